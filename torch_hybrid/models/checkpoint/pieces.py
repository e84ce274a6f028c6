"""The bytes of slices, in pieces that are read at once, each to its place.

Pieces that follow one another in a file are read by one call. A piece on its way to the host is
read in place, if it lies in one run and has its place's dtype. Any other passes through a buffer.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.models.checkpoint.content import Content, Slice, leaves, slices

PIECE_BYTES = 4 << 20  # bytes of a file that a thread reads at once
LONG_RUN_BYTES = 64 << 10  # sparse rows this far apart are read one by one
_MOST_AT_ONCE = 256  # pieces of one preadv call; Linux takes 1024
_NAN = 0x7F  # NaN of float8_e4m3fn, without its sign
_NUM_BUFFERS = 2  # buffers of a thread for a GPU: it fills one while the other is copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slice that spans at most ``PIECE_BYTES`` of a file, and its place.

    Attributes:
        start: the first byte in the file.
        num_bytes: bytes from the first value to the end of the last.
        is_plain: whether the bytes of the file are those of the place, in order.
    """

    part: Slice
    place: Tensor
    start: int
    num_bytes: int
    is_plain: bool

    @classmethod
    def of(cls, part: Slice, place: Tensor) -> Piece:
        """Describe how a slice is read."""
        stored, where = part.stored, part.where
        is_one_run = where.is_contiguous() and place.is_contiguous()
        steps = zip(where.shape, where.stride(), strict=True)
        num_values = 1 + sum((size - 1) * stride for size, stride in steps)
        return cls(
            part=part,
            place=place,
            start=stored.start + int(where.storage_offset()) * where.itemsize,
            num_bytes=num_values * where.itemsize,
            is_plain=is_one_run and not part.steps and stored.dtype == place.dtype,
        )


def pieces_of(part: Slice, place: Tensor) -> list[Piece]:
    """Cut a slice along its longest strides, until a thread can read each part of it at once."""
    if not place.numel():
        return []
    piece, itemsize = Piece.of(part, place), part.where.itemsize
    if piece.is_plain and piece.num_bytes <= PIECE_BYTES:
        return [piece]
    strides = [s * (n > 1) for n, s in zip(place.shape, part.where.stride(), strict=True)]
    row_bytes = max(strides, default=0) * itemsize
    is_sparse = 3 * place.numel() * itemsize < 2 * piece.num_bytes
    has_gaps = is_sparse and row_bytes >= LONG_RUN_BYTES
    if piece.num_bytes <= PIECE_BYTES and not has_gaps:
        return [piece]
    dim = strides.index(max(strides))
    num_rows = 1 if has_gaps else max(1, PIECE_BYTES // row_bytes)
    found: list[Piece] = []
    for first in range(0, place.shape[dim], num_rows):
        count = min(num_rows, place.shape[dim] - first)
        rows = part.viewed(lambda tensor: tensor.narrow(dim, first, count))  # noqa: B023
        found += pieces_of(rows, place.narrow(dim, first, count))
    return found


def stretches_of(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Sort pieces by file, and join those that are read at once, of at most ``PIECE_BYTES``."""
    found: list[list[Piece]] = []
    file, end, num_bytes = Path(), 0, 0
    for piece in sorted(pieces, key=lambda piece: (str(piece.part.stored.file), piece.start)):
        num_bytes += piece.num_bytes
        follows = found and piece.start == end and piece.part.stored.file == file
        if follows and num_bytes <= PIECE_BYTES and len(found[-1]) < _MOST_AT_ONCE:
            found[-1].append(piece)
        else:
            found.append([piece])
            num_bytes = piece.num_bytes
        file, end = piece.part.stored.file, piece.start + piece.num_bytes
    return found


class Reader:
    """A thread's reader of files, with buffers for pieces that cannot be read in place.

    For a GPU as ``device``, all pieces pass through the buffers. The thread waits only for a buffer
    that it is about to fill again.
    """

    def __init__(self, files: Mapping[Path, int], device: torch.device) -> None:
        self._files, self._device = files, device
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def read(self, stretch: Sequence[Piece]) -> None:
        """Read consecutive pieces of a file, each to its place."""
        if all(piece.is_plain and piece.place.is_cpu for piece in stretch):
            self._fill([piece.place for piece in stretch], stretch)
            return
        buffer = self._next_buffer()
        sizes = [piece.num_bytes for piece in stretch]
        raw = buffer.memory[: sum(sizes)].split(sizes)
        self._fill(raw, stretch)
        for piece, values in zip(stretch, raw, strict=True):
            self._put(piece, values)
        buffer.was_used()

    def _put(self, piece: Piece, raw: Tensor) -> None:
        """Bring bytes of the host to where a piece belongs, as its steps say."""
        part, place = piece.part, piece.place
        if piece.is_plain:
            place.view(-1).view(torch.uint8).copy_(raw, non_blocking=True)
            return
        raw = raw.to(place.device, non_blocking=True)
        if raw.storage_offset() % part.where.itemsize:  # unaligned: a narrower dtype lies before it
            raw = raw.clone()
        values = raw.view(part.stored.dtype)
        values = values.as_strided(part.where.shape, part.where.stride(), values.storage_offset())
        place.copy_(part.made_of(values))

    def _next_buffer(self) -> _Buffer:
        """Return the buffer that was used longest ago, when it is free."""
        if len(self._buffers) < (1 if self._device.type == "cpu" else _NUM_BUFFERS):
            self._buffers.append(_Buffer(self._device))
        self._turn += 1
        buffer = self._buffers[self._turn % len(self._buffers)]
        buffer.wait()
        return buffer

    def _fill(self, memory: Sequence[Tensor], stretch: Sequence[Piece]) -> None:
        """Read the bytes of each piece into host memory."""
        targets = [
            memoryview((ctypes.c_char * piece.num_bytes).from_address(target.data_ptr()))
            for target, piece in zip(memory, stretch, strict=True)
        ]
        descriptor, first = self._files[stretch[0].part.stored.file], stretch[0].start
        while targets:
            count = os.preadv(descriptor, targets, first)
            if count == 0:
                part = stretch[-len(targets)].part
                raise OSError(f"{part.stored.file.name} ends within {part.stored.name}")
            first += count
            while targets and count >= len(targets[0]):
                count -= len(targets.pop(0))
            if count:
                targets[0] = targets[0][count:]


class _Buffer:
    """Host memory that a device copies from while the next buffer is filled."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        self._device = device
        self._copied = torch.cuda.Event() if is_cuda else None

    def was_used(self) -> None:
        """Note that what the device was told so far reads it."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until the device has read it."""
        if self._copied is not None:
            self._copied.synchronize()


def count_not_finite(values: Tensor) -> int:
    """Count the values that are NaN or infinite."""
    if not values.is_floating_point() or not _may_be_not_finite(values):
        return 0
    if values.dtype == torch.float8_e4m3fn:
        return int((_without_sign(values) == _NAN).sum())
    return int((~values.isfinite()).sum())


def _may_be_not_finite(values: Tensor) -> Tensor:
    """Tell whether floats hold a NaN or infinity, or their sum overflows."""
    if values.dtype == torch.float8_e4m3fn:  # of which nothing is infinite, and torch has no sums
        return (_without_sign(values) == _NAN).any()
    # A 16-bit sum soon overflows; on a CPU a sum in another dtype would copy the values first.
    dtype = None if values.device.type == "cpu" else torch.float32
    return ~values.sum(dtype=dtype).isfinite()


def _without_sign(values: Tensor) -> Tensor:
    return values.view(torch.uint8) & 0x7F


def not_finite(weights: Sequence[Tensor], pieces: Sequence[Piece]) -> Counter[str]:
    """Count the values that are NaN or infinite, by the stored tensor that they are of.

    Args:
        weights: on one device; if all are finite, one number of each comes to the host.
        pieces: that they were read in.
    """
    doubts = [_may_be_not_finite(weight) for weight in weights if weight.is_floating_point()]
    found: Counter[str] = Counter()
    if doubts and torch.stack(doubts).any():
        for piece in pieces:
            found[piece.part.stored.name] += count_not_finite(piece.place)
    return found


@contextmanager
def reader_of(*contents: Content) -> Iterator[Reader]:
    """Open a reader of some contents to the host."""
    files: dict[Path, int] = {}
    try:
        for file in {part.stored.file for part in leaves(*contents)}:
            files[file] = os.open(file, os.O_RDONLY)
        yield Reader(files, torch.device("cpu"))
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def read_content(reader: Reader, content: Content, place: Tensor) -> None:
    """Read all of a content to a tensor of its shape."""
    for part, where in slices(content, place):
        for piece in pieces_of(part, where):
            reader.read([piece])


def values_of(content: Content, dtype: torch.dtype) -> Tensor:
    """Read a content now, to the host."""
    values = torch.empty(content.shape, dtype=dtype, device="cpu")
    with reader_of(content) as reader:
        read_content(reader, content, values)
    return values
