"""The bytes of unread weights, from files straight to where a model keeps them.

Threads take pieces in the order of the files. A piece that lies in one run, is of the dtype that
the weight has, and goes to the host is read into the weight's own memory; any other passes through
the thread's buffer.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_hybrid.caches.room import check_room
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host import weight_memory
from torch_hybrid.models.checkpoint.content import Content, Slice, slices
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.checkpoint.unread import Unread

_PIECE = 4 << 20  # bytes of a file that a thread reads at once
_LONG_RUN = 64 << 10  # bytes; rows so far apart are read one by one where little is kept of each
_NUM_THREADS = min(16, 4 * (os.cpu_count() or 1))  # files may lie on a disk, or beyond a network

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slice, of at most ``_PIECE`` bytes from its first value to its last, and where it goes."""

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


def read_weights(
    module: nn.Module, checkpoint: Checkpoint, device: torch.device, *, label: str = "loading"
) -> None:
    """Read every unread parameter and buffer of ``module``, and move the others to ``device``.

    Args:
        module: whose weights are replaced; one that has several places stays one.
        checkpoint: that they are of.
        device: where they go.
        label: of the progress bar, which is shown on a terminal.

    Raises:
        UnsupportedError: the values of a weight are stored as no floats of 16 bits or more.
        CapacityError: the device has no room for the weights.
        ValueError: a file is unreadable or was changed meanwhile, or weights have NaN or infinite
            values.
    """
    places = _places(module)
    for weight, where in places.items():
        if weight.is_meta:
            raise NotImplementedError(f"{where[0][1]} is made of values that are not read yet")
    unread = {weight: weight.content for weight in places if isinstance(weight, Unread)}
    _check_dtypes(unread)
    limits = "their precision (dtype), or share the model among more ranks"
    num_bytes = sum(weight.nbytes for weight in unread)
    check_room(num_bytes, device, what="the weights", limits=limits)
    memory = weight_memory([(weight.shape, weight.dtype) for weight in unread], device)
    pieces = [
        piece
        for content, own in zip(unread.values(), memory, strict=True)
        for part, place in slices(content, own)
        if place.numel()
        for piece in _pieces(part, place)
    ]
    pieces.sort(key=lambda piece: (piece.file, piece.start))
    _read_all(pieces, checkpoint, device, label)
    owned = dict(zip(unread, memory, strict=True))
    for weight, where in places.items():
        own = owned[weight] if weight in owned else weight.detach().to(device)
        if isinstance(weight, nn.Parameter):
            own = nn.Parameter(own, requires_grad=False)
        for store, name in where:
            store[name] = own


# Where modules keep a weight: their parameters or buffers, and its name there.
_Places = dict[Tensor, list[tuple[dict[str, Tensor | None], str]]]


def _places(module: nn.Module) -> _Places:
    places: _Places = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, weight in store.items():
                if weight is not None:
                    places.setdefault(weight, []).append((store, name))  # type: ignore[arg-type]
    return places


def _check_dtypes(weights: Mapping[Unread, Content]) -> None:
    """Refuse integers and floats of 8 bits where floats are wanted: they are worth nothing without
    scales."""
    for weight, content in weights.items():
        for part, _ in slices(content, torch.empty(weight.shape, device="meta")):
            stored = part.stored
            if weight.is_floating_point() and stored.dtype not in _FLOATS:
                raise UnsupportedError(
                    f"weight {stored.name} is stored as {stored.dtype}: quantized checkpoints are "
                    "not read"
                )


def _pieces(part: Slice, place: Tensor) -> Iterator[_Piece]:
    """A slice cut along its longest strides, until a thread can read each part of it at once."""
    piece = _Piece(part, place)
    num_kept = place.numel() * part.stored.dtype.itemsize
    strides = [s * (n > 1) for n, s in zip(place.shape, part.where.stride(), strict=True)]
    row_bytes = max(strides, default=0) * part.stored.dtype.itemsize
    has_gaps = 3 * num_kept < 2 * piece.num_bytes and row_bytes >= _LONG_RUN
    if piece.num_bytes <= _PIECE and not has_gaps:
        yield piece
        return
    dim = strides.index(max(strides))
    num_rows = 1 if has_gaps else max(1, _PIECE // row_bytes)
    for first in range(0, place.shape[dim], num_rows):
        count = min(num_rows, place.shape[dim] - first)
        rows = part.viewed(lambda tensor: tensor.narrow(dim, first, count))  # noqa: B023
        yield from _pieces(rows, place.narrow(dim, first, count))


def _read_all(
    pieces: list[_Piece], checkpoint: Checkpoint, device: torch.device, label: str
) -> None:
    """Read all pieces in several threads; the first error ends it."""
    from tqdm import tqdm

    num_bytes = sum(piece.num_bytes for piece in pieces)
    with (
        checkpoint.opened({piece.file for piece in pieces}) as files,
        tqdm(total=num_bytes, desc=label, unit="B", unit_scale=True, disable=None) as bar,
        _worker_threads() as threads,
    ):
        todo, stop, lock = iter(pieces), threading.Event(), threading.Lock()

        def work() -> Counter[str]:
            """How many values of each stored tensor are NaN or infinite."""
            torch.set_num_threads(1)  # else each copy starts as many as there are cores
            reader, found = _Reader(files, device), Counter[str]()
            for piece in todo:  # of all threads: each takes the next
                if stop.is_set():
                    break
                found[piece.part.stored.name] += reader.read(piece)
                with lock:
                    bar.update(piece.num_bytes)
            return found

        try:
            done = [threads.submit(work) for _ in range(_NUM_THREADS)]
            wrong = sum((future.result() for future in done), Counter[str]())
        finally:
            stop.set()
    if wrong := +wrong:
        counts = ", ".join(f"{name} has {count}" for name, count in sorted(wrong.items()))
        raise ValueError(f"weight {counts} NaN or infinite values")


@contextmanager
def _worker_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that may change how many threads torch uses."""
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="read weights") as threads:
            yield threads
    finally:
        torch.set_num_threads(num_threads)


class _Reader:
    """One thread's way to the files, with a buffer for what cannot be read in place."""

    def __init__(self, files: Mapping[Path, int], device: torch.device) -> None:
        self._files, self._device = files, device
        self._buffer: Tensor | None = None

    def read(self, piece: _Piece) -> int:
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
                is_cast = isinstance(step, torch.dtype)
                values = values.to(step) if is_cast else values * step.to(place.device)
            place.copy_(values)
            if place.device.type == "cuda":  # before the buffer is filled anew
                torch.cuda.current_stream(place.device).synchronize()
        return _count_not_finite(place)

    def _staged(self, piece: _Piece) -> Tensor:
        """The bytes of a piece in this thread's buffer."""
        if self._buffer is None:
            is_cuda = self._device.type == "cuda"
            self._buffer = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        raw = self._buffer[: piece.num_bytes]
        self._fill(raw, piece)
        return raw

    def _fill(self, memory: Tensor, piece: _Piece) -> None:
        """Read the bytes of a piece to memory of the host."""
        target = memoryview((ctypes.c_char * piece.num_bytes).from_address(memory.data_ptr()))
        num_read = 0
        while num_read < piece.num_bytes:
            count = os.preadv(self._files[piece.file], [target[num_read:]], piece.start + num_read)
            if count == 0:
                raise OSError(f"{piece.file.name} ends within {piece.part.stored.name}")
            num_read += count


def _count_not_finite(values: Tensor) -> int:
    # A sum is finite only if every term is (or by overflow, which the exact test settles).
    if not values.is_floating_point() or values.sum().isfinite():
        return 0
    return int((~values.isfinite()).sum())
