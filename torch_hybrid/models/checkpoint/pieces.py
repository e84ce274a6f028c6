"""The bytes of slices: in pieces that are read at once, each to its place.

A piece that lies in one run, is of the dtype that its place has, and goes to the host is read into
that memory; any other passes through a buffer.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.models.checkpoint.content import Content, Slice, slices

PIECE_BYTES = 4 << 20  # of a file, that a thread reads at once
LONG_RUN_BYTES = 64 << 10  # rows so far apart are read one by one, where little of them is kept
_NAN = 0x7F  # of float8_e4m3fn, without its sign
_NUM_BUFFERS = 2  # of a thread on its way to a GPU: one is filled while the other is copied


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice, of at most ``PIECE_BYTES`` from its first value to its last, and where it goes."""

    part: Slice
    place: Tensor

    @property
    def file(self) -> Path:
        return self.part.stored.file

    @property
    def start(self) -> int:
        """Its first byte in the file."""
        stored, where = self.part.stored, self.part.where
        return stored.start + int(where.storage_offset()) * stored.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """From its first value to its last."""
        where = self.part.where
        steps = zip(where.shape, where.stride(), strict=True)
        return (1 + sum((size - 1) * stride for size, stride in steps)) * where.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are those of the weight, one after the other."""
        part, place = self.part, self.place
        is_one_run = part.where.is_contiguous() and place.is_contiguous()
        is_same = not part.steps and part.stored.dtype == place.dtype
        return is_one_run and is_same


def pieces_of(part: Slice, place: Tensor) -> Iterator[Piece]:
    """A slice cut along its longest strides, until a thread can read each part of it at once."""
    piece = Piece(part, place)
    num_kept = place.numel() * part.stored.dtype.itemsize
    strides = [s * (n > 1) for n, s in zip(place.shape, part.where.stride(), strict=True)]
    row_bytes = max(strides, default=0) * part.stored.dtype.itemsize
    has_gaps = 3 * num_kept < 2 * piece.num_bytes and row_bytes >= LONG_RUN_BYTES
    if piece.num_bytes <= PIECE_BYTES and not has_gaps:
        yield piece
        return
    dim = strides.index(max(strides))
    num_rows = 1 if has_gaps else max(1, PIECE_BYTES // row_bytes)
    for first in range(0, place.shape[dim], num_rows):
        count = min(num_rows, place.shape[dim] - first)
        rows = part.viewed(lambda tensor: tensor.narrow(dim, first, count))  # noqa: B023
        yield from pieces_of(rows, place.narrow(dim, first, count))


class Reader:
    """One thread's way to the files, with buffers for what cannot be read in place.

    To a GPU everything passes through them, and nothing waits for it but a buffer that is filled
    anew.
    """

    def __init__(self, files: Mapping[Path, int], device: torch.device) -> None:
        self._files, self._device = files, device
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def read(self, piece: Piece) -> int:
        """Read a piece to its place.

        Returns:
            How many of its values are NaN or infinite; 0 on a GPU, which is asked once for a weight
            (``not_finite``).
        """
        part, place = piece.part, piece.place
        if piece.is_plain and place.device.type == "cpu":
            self._fill(place, piece)
        else:
            buffer = self._next_buffer()
            raw = buffer.memory[: piece.num_bytes]
            self._fill(raw, piece)
            if piece.is_plain:
                place.view(-1).view(torch.uint8).copy_(raw, non_blocking=True)
            else:
                raw = raw.to(place.device, non_blocking=True)
                values = raw.view(part.stored.dtype)
                values = values.as_strided(part.where.shape, part.where.stride())
                place.copy_(part.made_of(values))
            buffer.was_used()
        return _count_not_finite(place) if place.device.type == "cpu" else 0

    def _next_buffer(self) -> _Buffer:
        """That which was used longest ago, when it is free."""
        if len(self._buffers) < (1 if self._device.type == "cpu" else _NUM_BUFFERS):
            self._buffers.append(_Buffer(self._device))
        self._turn += 1
        buffer = self._buffers[self._turn % len(self._buffers)]
        buffer.wait()
        return buffer

    def _fill(self, memory: Tensor, piece: Piece) -> None:
        """Read the bytes of a piece to memory of the host."""
        target = memoryview((ctypes.c_char * piece.num_bytes).from_address(memory.data_ptr()))
        num_read = 0
        while num_read < piece.num_bytes:
            count = os.preadv(self._files[piece.file], [target[num_read:]], piece.start + num_read)
            if count == 0:
                raise OSError(f"{piece.file.name} ends within {piece.part.stored.name}")
            num_read += count


class _Buffer:
    """Host memory that a device copies from while the next one is filled."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        self._device = device
        self._copied = torch.cuda.Event() if is_cuda else None

    def was_used(self) -> None:
        """What the device was told so far reads it."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until the device has read it."""
        if self._copied is not None:
            self._copied.synchronize()


def _count_not_finite(values: Tensor) -> int:
    if not values.is_floating_point() or not _may_be_not_finite(values):
        return 0
    if values.dtype == torch.float8_e4m3fn:
        return int((_without_sign(values) == _NAN).sum())
    return int((~values.isfinite()).sum())


def _may_be_not_finite(values: Tensor) -> Tensor:
    """Whether floats hold a NaN or infinity, or their sum overflows; read where it is asked for."""
    if values.dtype == torch.float8_e4m3fn:  # of which nothing is infinite, and torch has no sums
        return (_without_sign(values) == _NAN).any()
    # A sum of 16 bits soon overflows; on a CPU one in another dtype is that of a copy.
    dtype = None if values.device.type == "cpu" else torch.float32
    return ~values.sum(dtype=dtype).isfinite()


def _without_sign(values: Tensor) -> Tensor:
    return values.view(torch.uint8) & 0x7F


def not_finite(weights: Sequence[Tensor], pieces: Sequence[Piece]) -> Counter[str]:
    """How many values are NaN or infinite, by the stored tensor that they are of.

    Args:
        weights: on one device, of which one number each is looked at if all are finite.
        pieces: that they were read in.
    """
    doubts = [_may_be_not_finite(weight) for weight in weights if weight.is_floating_point()]
    found: Counter[str] = Counter()
    if doubts and torch.stack(doubts).any():
        for piece in pieces:
            found[piece.part.stored.name] += _count_not_finite(piece.place)
    return found


def values_of(content: Content, dtype: torch.dtype) -> Tensor:
    """What a content is, read now, on the host."""
    values = torch.empty(content.shape, dtype=dtype, device="cpu")
    files: dict[Path, int] = {}
    try:
        reader = Reader(files, values.device)
        for part, place in slices(content, values):
            if part.stored.file not in files:
                files[part.stored.file] = os.open(part.stored.file, os.O_RDONLY)
            for piece in pieces_of(part, place):
                reader.read(piece)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return values
