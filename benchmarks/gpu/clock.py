"""Time on a GPU: of calls that take turns, and what the GPU gives at best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Call = Callable[[], object]

# What a round of calls touches at least, to leave nothing in L2 for the next round.
ROUND_BYTES = 256_000_000
MOST_TURNS = 64
LEAST_CALLS = 8  # in what is timed at once
REPLAYS = 7


def num_turns(num_bytes: float) -> int:
    """How many calls on tensors of their own, of so many bytes each, take turns."""
    return max(1, min(MOST_TURNS, math.ceil(ROUND_BYTES / num_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Of one call."""

    us: float
    captured: bool  # in a CUDA graph; else launched one after another, the host's time in it


def time_of(calls: Sequence[Call]) -> Time:
    """Time one call of those that take turns: captured, or looped where they refuse to be."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = math.ceil(LEAST_CALLS / len(calls))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _run(calls, rounds)
    except RuntimeError:  # of the many that a call which reads from the device raises
        torch.cuda.synchronize()
        _renew_generator()
        return Time(us=_fastest(partial(_run, calls, rounds)) / rounds / len(calls), captured=False)
    return Time(us=_fastest(graph.replay) / rounds / len(calls), captured=True)


def _renew_generator() -> None:
    """Let numbers be drawn on the device again: a capture that broke leaves its generator as if the
    capture went on."""
    device = torch.cuda.current_device()
    fresh = torch.Generator(f"cuda:{device}")
    torch.cuda.default_generators[device].graphsafe_set_state(fresh.graphsafe_get_state())


def _run(calls: Sequence[Call], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


def _fastest(run: Call) -> float:
    """Microseconds between two events around it, of the fastest of several."""
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What this GPU gives at best: bytes and FLOPs per microsecond."""

    num_bytes: float
    flops: float

    def floor(self, num_bytes: float, flops: float) -> float:
        """Microseconds that a call takes at the least."""
        return max(num_bytes / self.num_bytes, flops / self.flops)

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e6:.2f} TB/s read and written, {self.flops / 1e6:.0f} TFLOP/s"


def measure_rates() -> Rates:
    """A pass that reads and writes 2 GB, and a bfloat16 product of 8192^3."""
    source = torch.ones(2**29, device="cuda")
    target = torch.empty_like(source)
    copy = time_of([partial(torch.neg, source, out=target)])
    moved = 2 * source.nbytes
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = time_of([partial(torch.mm, a, b)])
    return Rates(num_bytes=moved / copy.us, flops=2 * 8192**3 / product.us)
