"""The command line, of which ``main`` is the entry."""

from torch_hybrid.cli.commands import main

__all__ = ["main"]
