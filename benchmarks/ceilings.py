"""What the machine gives at best, as contestants beside a kernel: a read, and a matrix product.

Contestants take turns within one process and the fastest run of each counts, so that a ratio of
two of them means something on a machine that others use too.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_hybrid.ops.native import load_library

MATRIX = 2048


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How long a contestant takes: by the wall, or processor time shared out to the threads."""

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


def reader(num_bytes: int) -> Callable[[], object]:
    """Reads a buffer of this size with all threads."""
    read = load_library("benchmark_read", Path(__file__).with_name("_read.cpp")).th_read
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    buffer, threads = torch.ones(num_bytes // 4), torch.get_num_threads()
    return lambda: read(buffer.data_ptr(), buffer.numel(), threads)


def product(dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """A large matrix product, and its FLOPs."""
    a = torch.randn(MATRIX, MATRIX).to(dtype)
    return lambda: a @ a, 2 * MATRIX**3
