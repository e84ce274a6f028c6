"""What the machine gives at best, as contestants beside a kernel: a read, and multiply-adds.

Neither is a library's: a library that does not use all of a CPU would make every floor too kind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.timing import best_of
from torch_hybrid.ops.native import load_library

_KINDS = {torch.float32: ("floats",), torch.bfloat16: ("floats", "pairs of bf16", "tiles of AMX")}
_NUMBERS = {"floats": 0, "pairs of bf16": 1, "tiles of AMX": 2}
_ROUNDS = 200_000  # some milliseconds
_STREAMS = (1, 2, 4, 8)


def native_read() -> Callable[[int, int, int, int], object]:
    """``read(address, number of floats, threads, streams)`` in C++."""
    read = load_library("benchmark_read", Path(__file__).with_name("_read.cpp")).th_read
    read.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3]
    return read


def best_streams(address: int, num_floats: int, num_threads: int) -> int:
    """In how many streams a thread reads this memory the fastest."""
    read = native_read()
    seconds = {
        streams: best_of(lambda n=streams: read(address, num_floats, num_threads, n), rounds=4)
        for streams in _STREAMS
    }
    return min(seconds, key=seconds.__getitem__)


def reader(num_bytes: int) -> Callable[[], object]:
    """Reads a buffer of this size with all threads."""
    read, threads = native_read(), torch.get_num_threads()
    buffer = torch.ones(num_bytes // 4)
    streams = best_streams(buffer.data_ptr(), buffer.numel(), threads)
    return lambda: read(buffer.data_ptr(), buffer.numel(), threads, streams)


class Peak:
    """Multiply-adds of a dtype in registers that wait for nothing, with all threads.

    Of bf16, the fastest that the CPU has: widened to floats, in pairs, or in tiles of AMX.

    Attributes:
        kind: which it is.
        flops: of a call.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._run = load_library("benchmark_peak", Path(__file__).with_name("_peak.cpp")).th_peak
        self._run.argtypes = [*[ctypes.c_int64] * 3, ctypes.POINTER(ctypes.c_float)]
        self._run.restype = ctypes.c_double
        self._seen = (ctypes.c_float * 3)(0.5, 1.0, 0.0)
        rates = {kind: self._rate(kind) for kind in _KINDS[dtype]}
        self.kind = max(rates, key=rates.__getitem__)
        self.flops = self()

    def __call__(self, flops: float = 0.0) -> float:
        """FLOPs of the multiply-adds that it does: of some milliseconds, or at least ``flops``.

        As many as what it is the floor of: a CPU that has multiplied for long is clocked lower than
        one that begins.
        """
        rounds = round(_ROUNDS * flops / self.flops) if flops else _ROUNDS
        return self._of(self.kind, max(rounds, 1))

    def _of(self, kind: str, rounds: int) -> float:
        number, threads = _NUMBERS[kind], torch.get_num_threads()
        flops: float = self._run(number, rounds, threads, self._seen)
        return flops

    def _rate(self, kind: str) -> float:
        return self._of(kind, _ROUNDS) / best_of(lambda: self._of(kind, _ROUNDS), rounds=3)
