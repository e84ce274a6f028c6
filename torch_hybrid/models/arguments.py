"""Checks of the arguments of ``from_pretrained``, before anything is read."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.quantized import refuse_gguf

DTYPES = ("auto", "float32", "bfloat16", "float16")
_ALSO = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}


def checked_path(path_or_id: str | Path) -> str:
    """Check that a path is an existing folder or may be a hub id, and expand its ``~``.

    Raises:
        TypeError: the argument is neither a str nor a Path.
        ValueError: the argument can only be a folder, and there is none.
        UnsupportedError: the path is GGUF.
    """
    if not isinstance(path_or_id, str | Path):
        raise TypeError(
            f"path_or_id must be a folder or a hub id, as a str or a Path, got {path_or_id!r}"
        )
    path = os.path.expanduser(path_or_id)
    refuse_gguf(path)
    if os.path.isfile(path):
        raise ValueError(f"path_or_id must be a folder, got the file {path_or_id}")
    is_path = isinstance(path_or_id, Path) or not path or path.startswith(("/", "."))
    if is_path and not os.path.isdir(path):
        raise ValueError(f"there is no folder {path_or_id or repr(path_or_id)}")
    return path


def checked_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    """Look up the dtype of weights by torch's name or by a common alias ("bf16", "half").

    Raises:
        ValueError: the name is unknown, or the dtype has no floats as wide as float16.
    """
    if isinstance(dtype, str):
        name = dtype.lower().removeprefix("torch.")
        dtype = _ALSO.get(name, name if name in DTYPES else dtype)
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype in DTYPES or is_float:
        return dtype
    raise ValueError(
        f"dtype must be a torch.dtype of 16-bit floats or wider, or one of {sorted(DTYPES)}, "
        f"got {dtype!r}"
    )


def check_ranks(ranks: object) -> None:
    """Raise TypeError unless ranks are a process group or None."""
    if not isinstance(ranks, dist.ProcessGroup | None):
        raise TypeError(
            f"ranks must be a process group, as dist.group.WORLD is once torch.distributed is "
            f"initialised, or None, got {ranks!r}"
        )


def check_tables(tables: str) -> None:
    """Raise ValueError unless tables can be kept there: on the device or the host."""
    if tables not in ("device", "host"):
        raise ValueError(f"tables must be 'device' or 'host', got {tables!r}")


def checked_device(device: torch.device | str) -> torch.device:
    """Check that a device exists and that ops have implementations for it, and return it.

    Raises:
        ValueError: ``device`` names no device.
        UnsupportedError: torch sees no such device, or it is neither a CPU nor a CUDA device.
    """
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}") from error
    if checked.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device must be a CPU or CUDA device, got {device!r}")
    num_devices = torch.cuda.device_count()
    if checked.type == "cuda" and (checked.index or 0) >= num_devices:
        built = "" if torch.version.cuda else "; this torch is built without CUDA"
        raise UnsupportedError(
            f"device {str(device)!r} is not there: torch sees {num_devices} CUDA devices{built}"
        )
    return checked
