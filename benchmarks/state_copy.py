"""The state_copy op against plain copies of the same slots and pages.

python -m benchmarks.state_copy [--rounds N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.timing import interleave
from torch_hybrid.ops.state_copy import state_copy

NUM_LINEAR, NUM_FULL = 36, 12  # layers of Qwen3-Next


def contestants(
    pools: Sequence[Tensor], src: Sequence[int], dst: Sequence[int], dim: int
) -> dict[str, Callable[[], object]]:
    """Both implementations, and ``copy_`` of one index after the other."""
    pairs = [torch.tensor(indices, dtype=torch.int32) for indices in (src, dst)]

    def copies() -> None:
        for pool in pools:
            for s, d in zip(src, dst, strict=True):
                pool.select(dim, d).copy_(pool.select(dim, s))

    return {
        "cpp": lambda: state_copy(pools, *pairs, dim=dim, impl="cpp"),
        "torch": lambda: state_copy(pools, *pairs, dim=dim, impl="torch"),
        "copy_": copies,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    slots = [torch.randn(9, 32, 128, 128) for _ in range(NUM_LINEAR)]
    pages = [torch.randn(2, 65, 16, 2, 256) for _ in range(NUM_FULL)]
    calls = {
        f"1 slot of 2 MB in {NUM_LINEAR} layers": contestants(slots, [1], [5], 0),
        f"8 pages of 2 x 32 KB in {NUM_FULL} layers": contestants(
            pages, list(range(1, 9)), list(range(20, 28)), 1
        ),
    }
    print("| ms | cpp | torch | copy_ |\n|---|---:|---:|---:|")
    for name, runs in calls.items():
        times = interleave(runs, rounds=rounds)
        print(f"| {name} | " + " | ".join(f"{t.best * 1e3:.2f}" for t in times.values()) + " |")


if __name__ == "__main__":
    main()
