"""Mixers of transformers that train: boundaries of packed sequences, and differentiable ops."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from torch_hybrid.training.mixers.twin import TWINS, Twin

__all__ = ["TWINS", "Twin"]

for _file in iter_modules(__path__):  # each defines twins, which TWINS has by then
    import_module(f"{__name__}.{_file.name}")
