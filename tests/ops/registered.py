"""Every op of the package, from what the import of its families registers."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torch_hybrid import ops
from torch_hybrid.ops.core.registration import REGISTERED


@cache
def public_ops() -> Mapping[str, Callable[..., Any]]:
    """Import all families, which completes REGISTERED, and find the public function of each op."""
    paths = pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")
    names = [each.name for each in paths if re.search(r"\.op(_\w+)?$", each.name)]
    modules = [import_module(name) for name in names]
    return {name: vars(m)[name] for m in modules for name in REGISTERED if name in vars(m)}


def channel_recurrences() -> list[str]:
    """Names of the ops whose Triton kernels walk channels (``ops.triton.channel_programs``)."""
    [folder] = map(Path, ops.__path__)
    kernels = sorted(folder.glob("*/_triton.py"))
    return [file.parent.name for file in kernels if "ChannelPrograms" in file.read_text()]
