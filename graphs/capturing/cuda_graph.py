"""Steps captured as CUDA graphs, one for each bucket, and replayed.

Capture is manual. The caller (a runner, or a loop of your own) keeps a step's inputs at fixed
addresses (``StaticInputs``). It captures each bucket once on inputs that change no state. For each
step it then refreshes the inputs, and replays. On a CPU a replay calls the step on the same static
inputs, so that the code around it is the same.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.registration import REGISTERED

# Free memory below which nothing is captured ahead: what a runner holds may grow a little.
_SPARE = 256 << 20
_CAPTURING = RLock()  # for the process: steps of all runners are captured on one stream


@dataclass(frozen=True, slots=True)
class _Captured:
    """Captured graph and its output tensor; on a CPU there is only the step."""

    name: str
    step: Callable[[], Tensor]
    graph: torch.cuda.CUDAGraph | None = None
    output: Tensor | None = None


class CapturedSteps:
    """Captured steps by key, all in one memory pool.

    The result of a replay is overwritten by the next replay of any key: read it, or copy it, first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: dict[Hashable, _Captured] = {}
        self._pool: torch.cuda.MemPool | None = None
        self._nbytes = self._largest = 0
        self._seconds = 0.0
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._pool = torch.cuda.MemPool()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the captured steps, in order."""
        return tuple(step.name for step in self._steps.values())

    @property
    def nbytes(self) -> int:
        """Device memory that capturing took, for all graphs together."""
        return self._nbytes

    @property
    def seconds(self) -> float:
        """Time that capturing took, with the kernels that were built for it."""
        return self._seconds

    @property
    def has_room(self) -> bool:
        """True if the device has room for as much again as the largest graph took."""
        if self._pool is None:
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        return free > self._largest + _SPARE

    def capture(
        self, key: Hashable, step: Callable[[], Tensor], *, name: str | None = None
    ) -> None:
        """Capture ``step``, whose static inputs hold a step of padding now.

        The step runs once before its capture, to load kernels and tune them, on memory that the
        graph then takes. It must change no state of a sequence.

        Args:
            key: identifies the captured step.
            step: function to capture; it reads the static inputs.
            name: name for reports; the key's text by default.

        Raises:
            ValueError: ``key`` was captured before.
        """
        if key in self._steps:
            raise ValueError(f"{key} was captured before")
        name = str(key) if name is None else name
        if self._pool is None:
            self._steps[key] = _Captured(name, step)
            return
        start = time.perf_counter()
        with _CAPTURING, torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # torch.cuda.graph would, amid the count
            before = torch.cuda.memory_reserved()
            with on_capture_stream(self._device), torch.cuda.use_mem_pool(self._pool):
                step()
            graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self._device)
            pool: Any = self._pool.id  # annotated as a pair; graph wants another type
            with _nothing_collected(), torch.cuda.graph(graph, pool=pool, stream=stream):
                output = step()
            torch.cuda.synchronize()
            taken = torch.cuda.memory_reserved() - before
            self._nbytes, self._largest = self._nbytes + taken, max(self._largest, taken)
        self._seconds += time.perf_counter() - start
        self._steps[key] = _Captured(name, step, graph, output)

    def replay(self, key: Hashable) -> Tensor:
        """Run a captured step on what its static inputs hold now.

        Raises:
            KeyError: ``key`` was not captured.
        """
        captured = self._steps[key]
        if captured.graph is None or captured.output is None:
            return captured.step()
        captured.graph.replay()
        return captured.output


@contextmanager
def on_capture_stream(device: torch.device) -> Iterator[None]:
    """Run steps on the stream on which they will be captured; a CPU has no streams."""
    if device.type != "cuda":
        yield
        return
    stream, current = _capture_stream(device), torch.cuda.current_stream(device)
    with _CAPTURING:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Switch garbage collection off during a capture.

    Garbage may hold a pool of other graphs, and torch aborts the process if one is freed meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Make the one stream on which all steps are warmed up and captured.

    cuBLAS keeps memory for each stream that it was ever called on, 32 MiB on Hopper.
    """
    return torch.cuda.Stream(device)


def why_not_capturable(calls: Iterable[str]) -> tuple[str, ...]:
    """Explain which ops of a step, given as ``op[implementation]``, a CUDA graph cannot hold."""
    reasons = []
    for call in calls:
        op, _, impl = call.rstrip("]").partition("[")
        if not REGISTERED[op][impl].capability.cuda_graph:
            reasons.append(f"{op}: {impl} reads lengths on the host")
    return tuple(dict.fromkeys(reasons))
