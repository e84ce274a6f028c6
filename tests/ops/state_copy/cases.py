"""Inputs of state_copy: pools of real models and odd small ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shape and dtype of each pool, the indexed dim, and pairs (src, dst)."""

    pools: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    dim: int
    pairs: tuple[tuple[int, int], ...]


FP32, BF16 = torch.float32, torch.bfloat16

CASES = {
    "slots": Case(  # recurrent and conv state of Qwen3-Next, two layers each
        pools=(((5, 8, 128, 128), FP32), ((5, 3, 4096), BF16)) * 2,
        dim=0,
        pairs=((1, 4), (0, 2), (3, 0)),
    ),
    "pages": Case(
        pools=(((2, 9, 16, 2, 256), BF16),) * 3, dim=1, pairs=((7, 8), (7, 1), (0, 3), (0, 0))
    ),
    "odd": Case(
        pools=(((4, 1, 3), FP32), ((4,), FP32), ((4, 5), BF16)), dim=0, pairs=((3, 1), (0, 2))
    ),
    "one_pair": Case(pools=(((3, 7), FP32),), dim=0, pairs=((1, 2),)),
    "clear_all": Case(pools=(((2, 4, 5), FP32),), dim=1, pairs=((0, 1), (0, 2), (0, 3))),
    "all_skipped": Case(pools=(((3, 7), FP32),), dim=0, pairs=((1, 0), (0, 0), (2, 0))),
    "no_pair": Case(pools=(((3, 7), FP32),), dim=0, pairs=()),
    "no_pool": Case(pools=(), dim=0, pairs=((1, 2),)),
}


def make_inputs(case: Case, *, null: float = math.nan) -> tuple[list[Tensor], Tensor, Tensor]:
    """Random pools, whose null index holds ``null``, and the pairs as two tensors."""
    generator = torch.Generator().manual_seed(0)
    pools = []
    for shape, dtype in case.pools:
        pool = torch.randn(shape, generator=generator).to(dtype)
        pool.select(case.dim, 0).fill_(null)
        pools.append(pool)
    return pools, indices(s for s, _ in case.pairs), indices(d for _, d in case.pairs)


def indices(values: Iterable[int]) -> Tensor:
    """An int32 tensor of ``values``."""
    return torch.tensor(list(values), dtype=torch.int32)
