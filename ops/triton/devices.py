"""Properties of this machine's GPUs that kernels depend on, known without importing triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from functools import cache

import torch

# Tritons with the Gluon that kernels of Hopper are written in: it is experimental, and changes.
_GLUON_VERSIONS = ((3, 6), (3, 7))
PROCESSORS = 132  # of the GPUs that grids are made for, which have 108 to 148


def interpreted() -> bool:
    """Tell whether Triton's interpreter runs the kernels, also on CPU tensors
    (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_devices() -> frozenset[str]:
    """List the device types whose tensors a Triton kernel takes in this process."""
    return frozenset({"cuda", "cpu"}) if interpreted() else frozenset({"cuda"})


def triton_missing() -> str | None:
    """Say why Triton cannot be used here; None when it can."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def is_hopper(device: torch.device) -> bool:
    """Tell whether the device has WGMMA: asynchronous products of 64 rows, operands in shared
    memory.

    Operands then take no registers, which other GPUs need for them.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def launches_early(device: torch.device) -> bool:
    """Tell whether a kernel may begin before the one that it waits for ends (programmatic launch,
    PDL)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def converts_fp8(device: torch.device) -> bool:
    """Tell whether the device converts FP8 (e4m3) by an instruction, so that kernels take that
    dtype."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def fp8_products_missing() -> str | None:
    """Say why Triton's FP8 GEMMs cannot be used here; None when they can."""
    if triton_missing() is not None or interpreted():
        return triton_missing()
    if not torch.cuda.is_available() or is_hopper(torch.device("cuda")):
        return None  # without a GPU, the device says it
    major, minor = torch.cuda.get_device_capability()
    return f"products of 8 bits are for compute capability 9.0, this GPU has {major}.{minor}"


def runs_gluon(device: torch.device) -> bool:
    """Tell whether kernels written in Gluon (``ops/triton/hopper.py``) run on the device."""
    return is_hopper(device) and gluon_missing() is None


@cache
def gluon_missing() -> str | None:
    """Say why kernels written in Gluon cannot be compiled here; None when they can."""
    if triton_missing() is not None:
        return triton_missing()
    version = importlib.metadata.version("triton")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) in _GLUON_VERSIONS:
        return None
    return f"Gluon changes: it is known of triton 3.6 and 3.7, {version} is installed"


def multiplies_float32(x: torch.Tensor) -> bool:
    """Tell whether kernels multiply BF16 in float32: the interpreter, which holds BF16 as integers,
    would multiply them as such."""
    return interpreted() and x.dtype == torch.bfloat16


def rows_are_aligned(rows: torch.Tensor) -> bool:
    """Tell whether rows of BF16 or FP16 begin at multiples of 16 bytes, and the compiler can see
    it."""
    *strides, last = rows.stride()
    begins = rows.device.type != "cuda" or rows.data_ptr() % 16 == 0
    return last == 1 and begins and all(stride % 16 == 0 for stride in strides)
