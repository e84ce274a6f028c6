"""What ``from_pretrained`` is given, checked before anything is read."""

from __future__ import annotations

import os
from pathlib import Path

import torch

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
    """A folder that is there, or what may be a hub id.

    Raises:
        TypeError: it is neither a text nor a path.
        ValueError: it can only be a folder and is none.
        UnsupportedError: it is GGUF.
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
    """The dtype that weights are to have, by torch's name or one that people have for it.

    Raises:
        ValueError: weights cannot have it.
    """
    if isinstance(dtype, str):
        name = dtype.lower().removeprefix("torch.")
        dtype = _ALSO.get(name, name if name in DTYPES else dtype)
    if dtype in DTYPES or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ValueError(
        f"dtype must be a torch.dtype of floats or one of {sorted(DTYPES)}, got {dtype!r}"
    )


def check_tables(tables: str) -> None:
    """Raise ValueError unless tables can be there."""
    if tables not in ("device", "host"):
        raise ValueError(f"tables must be 'device' or 'host', got {tables!r}")


def checked_device(device: torch.device | str) -> torch.device:
    """A device that is there and that ops have implementations for.

    Raises:
        ValueError: it is no name of a device.
        UnsupportedError: there is no such device here, or it is neither a CPU nor CUDA.
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
