"""Timing of contestants that share one process and one noisy machine.

With one torch thread, time is that of the thread and not of the clock: what else runs on the
machine then counts only by the memory bandwidth that it takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


def now() -> float:
    """Seconds on the clock that figures are taken by."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one contestant, run by run."""

    runs: tuple[float, ...]

    @property
    def best(self) -> float:
        """Of the fastest run."""
        return min(self.runs)

    @property
    def median(self) -> float:
        """Of the middle one."""
        return statistics.median(self.runs)

    def over(self, other: Times, *, least: float = 0.0) -> float:
        """How many times as long as ``other``, which took its turns with it: the middle one of the
        turns' ratios, so that a machine that is slow for some turns is so to both.

        ``least`` is what ``other`` takes at the least.
        """
        pairs = zip(self.runs, other.runs, strict=True)
        return statistics.median(ours / max(theirs, least) for ours, theirs in pairs)


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
            start = now()
            run()
            if turn >= warm_up:
                seconds[name].append(now() - start)
    return {name: Times(tuple(s)) for name, s in seconds.items()}


def best_of(run: Callable[[], Any], *, rounds: int) -> float:
    """Seconds of the fastest of several runs."""
    return interleave({"": run}, rounds=rounds)[""].best


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How long contestants take: by the wall, or processor time shared out to the threads.

    They take turns and the fastest run of each counts, so that a ratio of two of them means
    something on a machine that others use too.
    """

    seconds: float
    cpu_time: bool

    def fastest(self, contestants: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Seconds of the fastest run of each, by turns."""
        now, share = time.perf_counter, 1
        if self.cpu_time:
            now, share = time.process_time, torch.get_num_threads()
        best = dict.fromkeys(contestants, float("inf"))
        for run in contestants.values():
            run()
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            for name, run in contestants.items():
                start = now()
                run()
                best[name] = min(best[name], (now() - start) / share)
        return best


def clock_arguments(description: str) -> argparse.ArgumentParser:
    """The options of a benchmark that is timed by a Clock."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=4.0, help="per line")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time / threads, for a busy machine"
    )
    return parser


def clock_of(options: argparse.Namespace) -> Clock:
    """The clock, with torch's threads set as the options say."""
    torch.set_num_threads(options.threads)
    return Clock(seconds=options.seconds, cpu_time=options.cpu_time)
