"""Every op of the package, from what the import of its families registers."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from torch_hybrid import ops
from torch_hybrid.ops.core.registration import REGISTERED


@cache
def public_ops() -> Mapping[str, Callable[..., Any]]:
    """Import all families, which completes REGISTERED, and find the public function of each op."""
    paths = pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")
    modules = [import_module(each.name) for each in paths if each.name.endswith(".op")]
    return {name: vars(m)[name] for m in modules for name in REGISTERED if name in vars(m)}
