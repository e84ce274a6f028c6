"""The way of unread weights from files straight to where a model keeps them.

Each thread takes the next pieces in the order of the files.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.memory import pinned_memory, weight_memory
from torch_hybrid.models.checkpoint.block_scales import blocks_of
from torch_hybrid.models.checkpoint.content import Content, Slice, leaves, narrow, slices
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.checkpoint.packed_integers import enclosing, numbers_and_scales
from torch_hybrid.models.checkpoint.pieces import (
    Piece,
    Reader,
    count_not_finite,
    not_finite,
    pieces_of,
    stretches_of,
)
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.models.checkpoint.update import Origin, Origins
from torch_hybrid.ops.formats.stored_weights import dequantized

_MOST_THREADS = min(16, 4 * (os.cpu_count() or 1))  # files may lie on a disk, or beyond a network
# Past these, threads that copy to a device wait for each other more than for files.
_DEVICE_THREADS = 4

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    on_host: frozenset[Tensor] = frozenset(),
    label: str = "loading",
) -> Origins:
    """Read every unread parameter and buffer of ``module``, and move the others to ``device``.

    Args:
        module: the module whose weights are replaced; a tied weight stays tied.
        checkpoint: the checkpoint of the weights.
        device: the device of the new weights.
        on_host: unread parameters that go to pinned host memory, which a GPU reads in place.
        label: label of the progress bar, which is shown on a terminal.

    Returns:
        The content of each weight.

    Raises:
        UnsupportedError: a weight is neither stored in 16-bit floats or wider, nor with scales.
        ValueError: a file is unreadable or was changed meanwhile, or weights have NaN or infinite
            values.
    """
    places = _places(module)
    unread = _unread_of(places)
    memory = _memory_for(unread, device, on_host)
    widened: list[_Widened] = []
    pieces: list[Piece] = []
    for weight, own in zip(unread, memory, strict=True):
        for part, place in slices(weight.content, weight.place_in(own)):
            if part.stored.packed is not None:
                widened.append(_Widened.of_integers(part, place))
            elif part.stored.scales is None or part.stored.dtype == place.dtype:
                pieces += pieces_of(part, place)
            else:
                widened.extend(_Widened.of(*block) for block in blocks_of(part, place))
    for found in widened:
        pieces.extend(found.pieces)
    _read_all(pieces, checkpoint, device, label)
    for found in widened:
        found.widen()
    if device.type != "cpu":
        there = [own for own in memory if not own.is_cpu]
        _refuse_not_finite(not_finite(there, [piece for piece in pieces if not piece.place.is_cpu]))
    owned: dict[Tensor, Tensor] = dict(zip(unread, memory, strict=True))
    for held, where in places.items():
        own = owned[held] if held in owned else held.detach().to(device)
        if isinstance(held, nn.Parameter):
            own = nn.Parameter(own, requires_grad=False)
        for store, name in where:
            store[name] = own
    origins = [Origin(weight.content, weight.unit, *places[weight][0]) for weight in unread]
    return Origins(origins, checkpoint.tensors)


def _memory_for(
    weights: Sequence[Unread], device: torch.device, on_host: frozenset[Tensor]
) -> list[Tensor]:
    kept = [weight for weight in weights if weight in on_host]
    others = [weight for weight in weights if weight not in on_host]
    own = [*pinned_memory(_sizes(kept)), *weight_memory(_sizes(others), device)]
    memory: dict[Unread, Tensor] = dict(zip([*kept, *others], own, strict=True))
    return [memory[weight] for weight in weights]


def _sizes(weights: Sequence[Unread]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(weight.shape, weight.dtype) for weight in weights]


def needed_bytes(module: nn.Module, *, without: Iterable[nn.Module] = ()) -> int:
    """Count the bytes of the unread weights of ``module``, but those that only parts ``without``
    have.

    Raises:
        UnsupportedError: as :func:`read_weights`.
    """
    left_out = {id(store) for part in without for store in (part._parameters, part._buffers)}
    places = _places(module)
    unread = _unread_of(places)
    return sum(
        weight.nbytes
        for weight in unread
        if any(id(store) not in left_out for store, _ in places[weight])
    )


def read_rows(
    weight: Tensor, first: int, count: int, checkpoint: Checkpoint, device: torch.device
) -> Tensor:
    """Read rows of an unread weight, at most ``count`` of them, to ``device``.

    Raises:
        UnsupportedError, ValueError: as ``read_weights`` does.
    """
    assert isinstance(weight, Unread)
    _check_dtypes([weight])
    rows = narrow(weight.content, 0, first, min(count, len(weight) - first))
    values = torch.empty(rows.shape, dtype=weight.dtype, device=device)
    _read_all(_pieces(rows, values), checkpoint, device, label=None)
    return values


def _pieces(content: Content, place: Tensor) -> list[Piece]:
    return [piece for part in slices(content, place) for piece in pieces_of(*part)]


@dataclass(frozen=True, slots=True)
class _Widened:
    """A weight that is dequantized as it is read, as no layer takes its numbers and scales."""

    place: Tensor
    numbers: Tensor
    scales: Tensor
    pieces: list[Piece]
    wanted: tuple[slice, ...] = ()  # the part of the dequantized values

    @classmethod
    def of(cls, part: Slice, scales: Content, place: Tensor) -> _Widened:
        numbers = torch.empty(part.shape, dtype=part.stored.dtype, device=place.device)
        factors = torch.empty(scales.shape, dtype=torch.float32, device=place.device)
        bare = replace(part, steps=())
        pieces = [*_pieces(bare, numbers), *_pieces(scales, factors)]
        return cls(place, numbers, factors, pieces)

    @classmethod
    def of_integers(cls, part: Slice, place: Tensor) -> _Widened:
        outer, wanted = enclosing(part)
        pieces: list[Piece] = []
        read = []
        for weight in numbers_and_scales(Unread(outer, place.dtype, place.device)):
            read.append(torch.empty(weight.shape, dtype=weight.dtype, device=place.device))
            pieces.extend(_pieces(weight.content, weight.place_in(read[-1])))
        numbers, scales = read
        return cls(place, numbers, scales, pieces, wanted)

    def widen(self) -> None:
        worth = dequantized(self.numbers, self.scales, self.place.dtype)
        self.place.copy_(worth[self.wanted])


# The places of each weight: a module's parameters or buffers, and its name there.
_Places = dict[Tensor, list[tuple[dict[str, Tensor | None], str]]]


def _places(module: nn.Module) -> _Places:
    places: _Places = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, weight in store.items():
                if weight is not None:
                    places.setdefault(weight, []).append((store, name))  # type: ignore[arg-type]
    return places


def _unread_of(places: _Places) -> list[Unread]:
    """Return the weights that are to be read, checked."""
    for weight, where in places.items():
        if weight.is_meta:
            raise NotImplementedError(f"{where[0][1]} is made of values that are not read yet")
    unread = [weight for weight in places if isinstance(weight, Unread)]
    _check_dtypes(unread)
    return unread


def _check_dtypes(weights: Sequence[Unread]) -> None:
    """Refuse tensors that cannot be read, and integers and FP8 without scales where floats are
    wanted."""
    for part in leaves(*(weight.content for weight in weights)):
        if part.stored.refusal is not None:
            raise part.stored.refusal
    for part in leaves(*(weight.content for weight in weights if weight.is_floating_point())):
        stored, made = part.stored, part.steps[-1:]
        if not (stored.dtype in _FLOATS or stored.is_scaled or any(map(callable, made))):
            raise UnsupportedError(
                f"weight {stored.name} is stored as {stored.dtype}: quantized checkpoints are not "
                "read"
            )


def _read_all(
    pieces: list[Piece], checkpoint: Checkpoint, device: torch.device, label: str | None
) -> None:
    """Read all pieces in several threads until the first error, with a bar if there is a label."""
    num_bytes = sum(piece.num_bytes for piece in pieces)
    num_threads = _MOST_THREADS if device.type == "cpu" else min(_DEVICE_THREADS, _MOST_THREADS)
    with (
        checkpoint.opened({piece.part.stored.file for piece in pieces}) as files,
        progress_bar(num_bytes, label) as bar,
        _worker_threads(num_threads) as threads,
    ):
        todo, stop, lock = iter(stretches_of(pieces)), threading.Event(), threading.Lock()

        def work() -> Counter[str]:
            """Read runs of pieces, and count the NaN or infinite values of each stored tensor."""
            torch.set_num_threads(1)  # else each copy starts as many as there are cores
            reader, found = Reader(files, device), Counter[str]()
            for stretch in todo:  # shared: each thread takes the next
                if stop.is_set():
                    break
                reader.read(stretch)
                for piece in stretch:
                    if piece.place.is_cpu:  # while the cache holds the piece
                        found[piece.part.stored.name] += count_not_finite(piece.place)
                with lock:
                    bar.update(sum(piece.num_bytes for piece in stretch))
            return found

        try:
            done = [threads.submit(work) for _ in range(num_threads)]
            wrong = sum((future.result() for future in done), Counter[str]())
        finally:
            stop.set()
    _refuse_not_finite(wrong)


def _refuse_not_finite(found: Counter[str]) -> None:
    """Raise ValueError if stored tensors have NaN or infinite values."""
    if found := +found:
        counts = ", ".join(f"{name} has {count}" for name, count in sorted(found.items()))
        raise ValueError(f"weight {counts} NaN or infinite values")


def progress_bar(num_bytes: int, label: str | None) -> Any:
    """Return a bar that is shown on a terminal alone."""
    from tqdm import tqdm

    disable = None if label else True
    return tqdm(total=num_bytes, desc=label, unit="B", unit_scale=True, disable=disable)


@contextmanager
def _worker_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads that may change how many threads torch uses."""
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="read weights") as threads:
            yield threads
    finally:
        torch.set_num_threads(num_threads)
