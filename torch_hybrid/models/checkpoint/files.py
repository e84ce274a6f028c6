"""The tensors of a folder of safetensors: where they lie, by headers and index alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.checkpoint.content import Slice, Stored
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.ops import block_scales

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SCALES = "_scale_inv"  # behind the name of a weight of 8 bits
_PREFIX = 8  # bytes, which say how long the header is
_LONGEST_HEADER = 100_000_000  # bytes, as the format has it

_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}

# By which a file that was written to, or replaced, is known: inode, size, time of the last write.
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The tensors of a folder by name, and what its files were when their headers were read."""

    folder: Path
    tensors: Mapping[str, Stored]
    stamps: Mapping[Path, Stamp]

    def unread(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, Unread]:
        """All tensors, to be read to ``device``; those that have scales are of ``dtype``."""
        return {
            name: Unread(Slice.whole(stored), dtype if stored.is_scaled else stored.dtype, device)
            for name, stored in self.tensors.items()
        }

    def with_block_scales(self) -> Checkpoint:
        """The same where numbers of 8 bits have their scales, and scales are no tensors beside
        them.

        Raises:
            ValueError: scales are missing, or of another shape or dtype than blocks have.
        """
        tensors = dict(self.tensors)
        for name, numbers in self.tensors.items():
            if numbers.dtype == block_scales.DTYPE:
                scales = tensors.pop(f"{name}{_SCALES}", None)
                self._check_scales(numbers, scales)
                tensors[name] = replace(numbers, scales=scales)
        return replace(self, tensors=tensors)

    def _check_scales(self, numbers: Stored, scales: Stored | None) -> None:
        *leading, num_rows, depth = numbers.shape
        shape = [*leading, *map(block_scales.num_blocks, (num_rows, depth))]
        expected = (
            f"must have scales {numbers.name}{_SCALES} of shape {shape} in float32 or bfloat16"
        )
        if scales is None:
            raise ValueError(f"{numbers.name} in {self.folder} {expected}, got none")
        if [*scales.shape] != shape or scales.dtype not in (torch.float32, torch.bfloat16):
            got = f"{[*scales.shape]} in {str(scales.dtype).removeprefix('torch.')}"
            raise ValueError(f"{numbers.name} in {self.folder} {expected}, got {got}")

    @contextmanager
    def opened(self, paths: Iterable[Path]) -> Iterator[dict[Path, int]]:
        """The descriptors of some files, which at the end must be as they were.

        Raises:
            ValueError: one is gone, or was written to or replaced.
        """
        files: dict[Path, int] = {}
        try:
            for path in paths:
                files[path] = os.open(path, os.O_RDONLY)
            self._check_unchanged(files)
            yield files
            self._check_unchanged(files)
        except OSError as error:
            raise ValueError(f"cannot read the weights in {self.folder}: {error}") from error
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def _check_unchanged(self, files: Mapping[Path, int]) -> None:
        for path, descriptor in files.items():
            if not self.stamps[path] == _stamp(os.fstat(descriptor)) == _stamp(os.stat(path)):
                raise ValueError(
                    f"cannot read the weights in {self.folder}: {path.name} was changed meanwhile"
                )


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of a checkpoint: of ``model.safetensors``, of the files that the index
    names, or without either of all ``*.safetensors``.

    Raises:
        ValueError: a file is missing, truncated or no safetensors; the index names a file or a
            tensor that is not there; or two files have the same tensor.
        UnsupportedError: a tensor has a dtype that torch does not have.
    """
    try:
        weight_map = _weight_map(folder)
        names = sorted(set(weight_map.values())) or _all_files(folder)
        if gone := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"the index {_INDEX} names files that are not there: {gone}")
        tensors: dict[str, Stored] = {}
        stamps: dict[Path, Stamp] = {}
        for name in names:
            found, stamps[folder / name] = _read_header(folder / name)
            for stored in found:
                if weight_map.get(stored.name, name) != name:
                    continue  # the index says that another file's counts
                if stored.name in tensors:
                    other = tensors[stored.name].file.name
                    raise ValueError(f"both {other} and {name} have a tensor {stored.name}")
                tensors[stored.name] = stored
        if gone := sorted(weight_map.keys() - tensors.keys()):
            raise ValueError(f"the index {_INDEX} names tensors that no file has: {gone}")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the weights in {folder}: {error}") from error
    return Checkpoint(folder=folder, tensors=tensors, stamps=stamps)


def _weight_map(folder: Path) -> Mapping[str, str]:
    """Which file has a tensor, by the index; nothing where there is none or one file has all."""
    index = folder / _INDEX
    if (folder / _ONE_FILE).is_file() or not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {name: Path(file).name for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{_INDEX} is no index of tensors and their files: {error!r}") from error
    if files != weight_map:
        raise ValueError(f"{_INDEX} names files outside of its folder")
    return files


def _all_files(folder: Path) -> list[str]:
    if (folder / _ONE_FILE).is_file():
        return [_ONE_FILE]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ValueError("no safetensors file found; weights of another format are not read")
    return names


def _read_header(path: Path) -> tuple[list[Stored], Stamp]:
    """The tensors of a file.

    Raises:
        ValueError: its header cannot be, or says more or fewer bytes than the file has.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        first, header = _header_of(file, status.st_size)
    try:
        header.pop("__metadata__", None)
        found = [_stored(name, path, first, entry) for name, entry in header.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} has a header that is none of safetensors") from error
    end = max((s.start + math.prod(s.shape) * s.dtype.itemsize for s in found), default=first)
    if end != status.st_size:
        raise ValueError(f"{path.name} must have {end:,} bytes, got {status.st_size:,}")
    return found, _stamp(status)


def _header_of(file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Where the values begin, and what the header says."""
    length = int.from_bytes(file.read(_PREFIX), "little")
    name = Path(file.name).name
    if size < _PREFIX or length > min(_LONGEST_HEADER, size - _PREFIX):
        raise ValueError(f"{name} is truncated or no safetensors file: it has {size:,} bytes")
    try:
        return _PREFIX + length, json.loads(file.read(length))
    except ValueError as error:
        raise ValueError(f"{name} has a header that is no JSON: {error}") from error


def _stored(name: str, path: Path, first: int, entry: Mapping[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    if (dtype := _DTYPES.get(entry["dtype"])) is None:
        raise UnsupportedError(
            f"{path}: tensor {name} has dtype {entry['dtype']}; those that can be read are "
            f"{sorted(_DTYPES)}"
        )
    shape = tuple(int(size) for size in entry["shape"])
    if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{path.name} has bytes {begin:,} to {end:,} of tensor {name}, which do not make "
            f"{[*shape]} of {entry['dtype']}"
        )
    return Stored(name=name, file=path, start=first + begin, dtype=dtype, shape=shape)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns
