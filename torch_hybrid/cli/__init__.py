"""The command line; ``main`` is its entry."""

from torch_hybrid.cli.commands import main

__all__ = ["main"]
