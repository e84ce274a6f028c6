"""Timing of contestants that share one process and one noisy machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one contestant: the fastest run, and the median."""

    best: float
    median: float


def interleave(
    contestants: Mapping[str, Callable[[], Any]], *, rounds: int, warm_up: int = 1
) -> dict[str, Times]:
    """Time contestants by turns, so that a slow spell of the machine hits all of them.

    Args:
        contestants: by name; one call is one run.
        rounds: runs of each that count.
        warm_up: runs of each before, that do not.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warm_up + rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: Times(min(s), statistics.median(s)) for name, s in seconds.items()}


def best_of(run: Callable[[], Any], *, rounds: int) -> float:
    """Seconds of the fastest of several runs."""
    return interleave({"": run}, rounds=rounds)[""].best
