"""Where Triton kernels run on this machine, asked without importing triton."""

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
    """Triton runs kernels in its interpreter, on CPU tensors too (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_devices() -> frozenset[str]:
    """Device types whose tensors a Triton kernel takes in this process."""
    return frozenset({"cuda", "cpu"}) if interpreted() else frozenset({"cuda"})


def triton_missing() -> str | None:
    """Why Triton cannot be used here, or None when it can."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def is_hopper(device: torch.device) -> bool:
    """Whether products of 64 rows run asynchronously on operands in shared memory alone.

    They leave registers that other GPUs need for operands.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def launches_early(device: torch.device) -> bool:
    """Whether a kernel may begin before the one that it waits for has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def converts_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for float8_e4m3fn, and kernels see them as such."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def fp8_products_missing() -> str | None:
    """Why Triton's products of 8 by 8 bits cannot be used here, or None when they can."""
    if triton_missing() is not None or interpreted():
        return triton_missing()
    if not torch.cuda.is_available() or is_hopper(torch.device("cuda")):
        return None  # without a GPU, the device says it
    major, minor = torch.cuda.get_device_capability()
    return f"products of 8 bits are for compute capability 9.0, this GPU has {major}.{minor}"


def runs_gluon(device: torch.device) -> bool:
    """Whether kernels written in Gluon (``ops/triton/hopper.py``) run on the device."""
    return is_hopper(device) and gluon_missing() is None


@cache
def gluon_missing() -> str | None:
    """Why kernels written in Gluon cannot be compiled here, or None when they can."""
    if triton_missing() is not None:
        return triton_missing()
    version = importlib.metadata.version("triton")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) in _GLUON_VERSIONS:
        return None
    return f"Gluon changes: it is known of triton 3.6 and 3.7, {version} is installed"


def rows_are_aligned(rows: torch.Tensor) -> bool:
    """Whether each row of 16-bit numbers begins at 16 bytes, and the compiler sees that it does."""
    *strides, last = rows.stride()
    begins = rows.device.type != "cuda" or rows.data_ptr() % 16 == 0
    return last == 1 and begins and all(stride % 16 == 0 for stride in strides)
