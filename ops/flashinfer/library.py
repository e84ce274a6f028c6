"""Availability of FlashInfer on this machine.

Nothing here imports FlashInfer, which takes seconds. Its functions' arguments change from release
to release, so versions that were not tested are refused by name.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from torch_hybrid.ops.triton.devices import triton_missing

TESTED = ((0, 7, 2), (0, 8))  # from the one version to before the other
HOPPER = frozenset({(9, 0)})
_INSTALL = "pip install torch-hybrid[flashinfer]"


def flashinfer_missing(
    *, capabilities: Collection[tuple[int, int]] = (), cutlass_dsl: bool = False
) -> Callable[[], str | None]:
    """Make a function that says why FlashInfer cannot be called here; None when it can.

    Args:
        capabilities: compute capabilities that its kernel is made for; any where empty.
        cutlass_dsl: whether nvidia-cutlass-dsl, a package of its own, compiles it; else nvcc.
    """

    def missing() -> str | None:
        return (
            _version_refused()
            or (_cutlass_missing() if cutlass_dsl else nvcc_missing())
            or triton_missing()
            or _device_refused(frozenset(capabilities))
        )

    return missing


def _version_refused() -> str | None:
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return f"flashinfer-python is not installed: {_INSTALL}"
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    first, last = TESTED
    if first <= release < last:
        return None
    return f"flashinfer-python {version} is not in the tested range {_range()}"


def _range() -> str:
    first, last = (".".join(map(str, release)) for release in TESTED)
    return f">={first},<{last}"


def _cutlass_missing() -> str | None:
    try:
        importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return f"nvidia-cutlass-dsl is not installed: {_INSTALL}"
    return None


def nvcc_missing() -> str | None:
    """Say why FlashInfer cannot build a kernel; None when it can, or when all kernels come built.

    nvcc is looked for where FlashInfer looks, in its order.
    """
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if Path(nvcc).exists():
        return None
    return f"nvcc, which builds it, is not at {nvcc}, and flashinfer-jit-cache is not installed"


def _device_refused(capabilities: frozenset[tuple[int, int]]) -> str | None:
    if not capabilities or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    if capability in capabilities:
        return None
    made_for = ", ".join(f"sm_{major}{minor}" for major, minor in sorted(capabilities))
    return f"its kernel is made for {made_for}, the device is sm_{capability[0]}{capability[1]}"
