"""The bytes of slices: in pieces that are read at once, each to its place.

A piece that lies in one run, is of the dtype that its place has, and goes to the host is read into
that memory; any other passes through a buffer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.models.checkpoint.content import Content, Slice, slices

PIECE_BYTES = 4 << 20  # of a file, that a thread reads at once
LONG_RUN_BYTES = 64 << 10  # rows so far apart are read one by one, where little of them is kept


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
        """Whether its bytes are those of the weight, one after the other, on the host."""
        part, place = self.part, self.place
        is_one_run = part.where.is_contiguous() and place.is_contiguous()
        is_same = not part.steps and part.stored.dtype == place.dtype
        return is_one_run and is_same and place.device.type == "cpu"


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
    """One thread's way to the files, with a buffer for what cannot be read in place."""

    def __init__(self, files: Mapping[Path, int], device: torch.device) -> None:
        self._files, self._device = files, device
        self._buffer: Tensor | None = None

    def read(self, piece: Piece) -> int:
        """Read a piece to its place.

        Returns:
            How many of its values are NaN or infinite.
        """
        part, place = piece.part, piece.place
        if piece.is_plain:
            self._fill(place, piece)
        else:
            raw = self._staged(piece).to(place.device, non_blocking=True)
            values = raw.view(part.stored.dtype).as_strided(part.where.shape, part.where.stride())
            for step in part.steps:
                if isinstance(step, torch.dtype):
                    values = values.to(step)
                else:
                    values = values * step.to(place.device)
            place.copy_(values)
            if place.device.type == "cuda":  # before the buffer is filled anew
                torch.cuda.current_stream(place.device).synchronize()
        return _count_not_finite(place)

    def _staged(self, piece: Piece) -> Tensor:
        """The bytes of a piece in this thread's buffer."""
        if self._buffer is None:
            is_cuda = self._device.type == "cuda"
            self._buffer = torch.empty(
                PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda, device="cpu"
            )
        raw = self._buffer[: piece.num_bytes]
        self._fill(raw, piece)
        return raw

    def _fill(self, memory: Tensor, piece: Piece) -> None:
        """Read the bytes of a piece to memory of the host."""
        target = memoryview((ctypes.c_char * piece.num_bytes).from_address(memory.data_ptr()))
        num_read = 0
        while num_read < piece.num_bytes:
            count = os.preadv(self._files[piece.file], [target[num_read:]], piece.start + num_read)
            if count == 0:
                raise OSError(f"{piece.file.name} ends within {piece.part.stored.name}")
            num_read += count


def _count_not_finite(values: Tensor) -> int:
    if values.dtype == torch.float8_e4m3fn:  # of which nothing is infinite, and torch has no sums
        return int(((values.view(torch.uint8) & 0x7F) == 0x7F).sum())
    # A sum is finite only if every term is (or by overflow, which the exact test settles).
    if not values.is_floating_point() or values.sum().isfinite():
        return 0
    return int((~values.isfinite()).sum())


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
