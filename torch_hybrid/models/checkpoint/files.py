"""The tensors of a folder of safetensors: their places, by headers and index alone."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.checkpoint.content import Stored
from torch_hybrid.models.checkpoint.folder import Listed, listed, not_there
from torch_hybrid.models.checkpoint.unread import Unread, unread_tensors
from torch_hybrid.ops.formats import block_scales

_SCALES = "_scale_inv"  # behind the name of an FP8 weight
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

# Inode, size and time of the last write: they change if a file is written to or replaced.
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The tensors of a folder by name, and the stamps of its files when their headers were read.

    ``gone`` has the tensors that the index names and no file has, and why. ``lost`` has those of
    files that are missing.
    """

    folder: Path
    tensors: Mapping[str, Stored]
    stamps: Mapping[Path, Stamp]
    gone: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, names: Iterable[str]) -> str:
        """Write an error about missing tensors, with the index's reasons."""
        return f"the checkpoint {self.folder} has missing keys: {sorted(names)}{self.reasons()}"

    def reasons(self) -> str:
        """Write which tensors of the index no file has, and why."""
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, reason in {**self.gone, **self.lost}.items():
            by_reason[reason].append(name)
        told = ""
        for reason, names in by_reason.items():
            told += f"; {reason}: {', '.join(sorted(names)[:4])}{', ...' * (len(names) > 4)}"
        return told

    def unread(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, Unread]:
        """Return all tensors, to be read to ``device``; those that have scales are of ``dtype``."""
        return unread_tensors(self.tensors, dtype, device)

    def with_block_scales(self) -> Checkpoint:
        """Give FP8 numbers their scales, which are then no tensors beside them.

        An FP8 tensor whose scales are missing, or have another shape or dtype, is refused when a
        model takes it.
        """
        tensors = dict(self.tensors)
        for name, numbers in self.tensors.items():
            if numbers.dtype == block_scales.DTYPE:
                scales = tensors.pop(f"{name}{_SCALES}", None)
                try:
                    self._check_scales(numbers, scales)
                    tensors[name] = replace(numbers, scales=scales)
                except ValueError as error:
                    tensors[name] = replace(numbers, refusal=error)
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
        """Open some files, which at the end must be as they were.

        Raises:
            ValueError: a file is gone, or was written to or replaced.
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


def open_checkpoint(folder: Path, named: str | None = None) -> Checkpoint:
    """Read the headers of the files of a checkpoint that ``listed`` finds.

    A tensor comes from the file that the index names. If the index does not name it, it comes from
    the last file that has it, as in transformers. Without an index, a tensor in two files is
    refused. What is missing or refused raises when a model takes it.

    Args:
        folder: folder of the checkpoint.
        named: a file of weights, or an index, that the config names.

    Raises:
        ValueError: there are no weights, or a file is truncated or no safetensors.
        UnsupportedError: the weights are in GGUF alone.
    """
    try:
        files = listed(folder, named)
        found: dict[str, list[Stored]] = defaultdict(list)
        stamps: dict[Path, Stamp] = {}
        missing: dict[str, str] = {}  # reasons by file
        for name in files.names:
            if (reason := not_there(folder / name)) is not None:
                missing[name] = reason
                continue
            stored, stamps[folder / name] = _read_header(folder / name)
            for each in stored:
                found[each.name].append(each)
        if len(missing) == len(files.names):
            raise ValueError("; ".join([*missing.values()][:4]))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the weights in {folder}: {error}") from error
    absent = files.weight_map.keys() - found.keys()
    return Checkpoint(
        folder=folder,
        tensors={name: _chosen(folder, files, each) for name, each in found.items()},
        stamps=stamps,
        gone={
            name: f"the index {files.index} names tensors that no file has"
            for name in absent
            if files.weight_map[name] not in missing
        },
        lost={
            name: f"the index {files.index} names a file, and {missing[files.weight_map[name]]}"
            for name in absent
            if files.weight_map[name] in missing
        },
    )


def _chosen(folder: Path, files: Listed, found: list[Stored]) -> Stored:
    """Choose the tensor that counts, of those of one name."""
    *others, last = found
    name = files.weight_map.get(last.name)
    for each in others:
        if name is not None and each.file == folder / name:
            return each
    if others and not files.weight_map:
        told = f"both {others[-1].file.name} and {last.file.name} have a tensor {last.name}"
        error = ValueError(f"cannot read the weights in {folder}: {told}")
        return replace(last, refusal=error)
    return last


def _read_header(path: Path) -> tuple[list[Stored], Stamp]:
    """Read which tensors a file has.

    Raises:
        ValueError: the header is invalid, or describes more or fewer bytes than the file has.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        first, header = _header_of(file, status.st_size)
    try:
        header.pop("__metadata__", None)
        found = [_stored(name, path, first, entry) for name, entry in header.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} has a header that is none of safetensors") from error
    end = max((first + entry["data_offsets"][1] for entry in header.values()), default=first)
    if end != status.st_size:
        raise ValueError(f"{path.name} must have {end:,} bytes, got {status.st_size:,}")
    return found, _stamp(status)


def _header_of(file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Return the byte at which values begin, and the header."""
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
    shape = tuple(int(size) for size in entry["shape"])
    if (dtype := _DTYPES.get(entry["dtype"])) is None:
        error = UnsupportedError(
            f"{path}: tensor {name} has dtype {entry['dtype']}; those that can be read are "
            f"{sorted(_DTYPES)}"
        )
        return Stored(
            name=name, file=path, start=first + begin, dtype=torch.uint8, shape=shape, refusal=error
        )
    if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{path.name} has bytes {begin:,} to {end:,} of tensor {name}, which do not make "
            f"{[*shape]} of {entry['dtype']}"
        )
    return Stored(name=name, file=path, start=first + begin, dtype=dtype, shape=shape)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns
