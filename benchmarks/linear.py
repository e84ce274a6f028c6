"""The linear op against torch's own linear layer and the floor of the machine.

    python -m benchmarks.linear [--threads N] [--seconds S]

Each call takes the next of many weights, together far larger than any cache, in huge pages as those
of a model are. The floor of a call
is the longer of its weight bytes at the read bandwidth and its FLOPs at the rate of multiply-adds
that wait for nothing, both measured beside the calls. The fastest call of each contestant counts.
With one thread, time is that of the thread, not of the clock: others on the machine then count
less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.ceilings import Peak, best_streams, native_read
from torch_hybrid.host.memory import weight_memory
from torch_hybrid.ops.linear.op import Linear, linear
from torch_hybrid.ops.linear.reference import linear_reference

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SHAPES = ((4096, 1024), (1024, 3072))
TOTAL_BYTES = 400_000_000
HEADER = "| dtype | N x K | M | floor us | cpp us | F.linear us | cpp | F.linear | ratio |"


def fastest(
    contestants: dict[str, Callable[[int], Any]], seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of the fastest call of each; no two calls in a row read the same weight."""
    best = dict.fromkeys(contestants, float("inf"))
    end, turn = time.perf_counter() + seconds, count()
    for round_number in count():
        if round_number > 2 and time.perf_counter() > end:
            break
        for name, run in contestants.items():
            before = clock()
            run(next(turn))
            if round_number:
                best[name] = min(best[name], clock() - before)
    return best


def compare(shape: tuple[int, int], dtype: torch.dtype, num_rows: int, seconds: float) -> str:
    """One line of the table."""
    num_weights = TOTAL_BYTES // (dtype.itemsize * shape[0] * shape[1])
    sizes = [(shape, dtype)] * num_weights
    weights = [weight.normal_() for weight in weight_memory(sizes, torch.device("cpu"))]
    x = torch.randn(num_rows, shape[1]).to(dtype)
    expected = linear_reference(Linear(x, weights[:1], [None], impl="cpp"))
    actual = linear(x, weights[:1], [None], impl="cpp")
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3 * shape[1] ** 0.5)

    read, peak = native_read(), Peak(dtype)
    size, threads = weights[0].nbytes // 4, torch.get_num_threads()
    streams = best_streams(weights[0].data_ptr(), size, threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = fastest(
        {
            "cpp": lambda i: linear(x, [weights[i % num_weights]], [None], impl="cpp"),
            "torch": lambda i: F.linear(x, weights[i % num_weights]),
            "read": lambda i: read(weights[i % num_weights].data_ptr(), size, threads, streams),
            "peak": lambda _: peak(),
        },
        seconds,
        clock,
    )
    flops = 2 * num_rows * weights[0].numel()
    floor = max(best["read"], best["peak"] * flops / peak.flops)
    cells = [str(dtype)[6:], f"{shape[0]} x {shape[1]}", num_rows]
    cells += [f"{t * 1e6:.0f}" for t in (floor, best["cpp"], best["torch"])]
    ratios = (best["cpp"] / floor, best["torch"] / floor, best["torch"] / best["cpp"])
    return "| " + " | ".join(map(str, [*cells, *(f"{r:.2f}" for r in ratios)])) + " |"


def main() -> None:
    """Print the table: times, their ratios to the floor, and that of F.linear to cpp."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per line of the table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(HEADER, "|---" * (HEADER.count("|") - 1) + "|", sep="\n")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            for num_rows in NUM_ROWS:
                print(compare(shape, dtype, num_rows, options.seconds), flush=True)


if __name__ == "__main__":
    main()
