"""Where Triton kernels run on this machine, asked without importing triton."""

from __future__ import annotations

import importlib.util
import os

import torch

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
