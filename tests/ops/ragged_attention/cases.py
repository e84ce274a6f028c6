"""Inputs of ragged_attention: the expanded heads of real models and odd small ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.declared import DeclaredInputs
from tests.ops.pages import offsets
from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse


@dataclass(frozen=True, kw_only=True)
class Case:
    """Heads, sizes, and for each sequence its (queries, keys)."""

    num_heads: int
    num_k_heads: int
    head_dim: int
    v_head_dim: int
    lengths: tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True)
class Inputs(DeclaredInputs, RaggedAttentionWithLse):
    """The arguments of one call."""

    impl: str = ""
    causal: bool = False

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype."""
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))


CASES = {
    "deepseek_v2_lite": Case(
        num_heads=16,
        num_k_heads=16,
        head_dim=192,
        v_head_dim=128,
        lengths=((70, 70), (3, 40), (1, 1), (19, 130)),
    ),
    "ling": Case(
        num_heads=4, num_k_heads=4, head_dim=96, v_head_dim=64, lengths=((33, 65), (5, 21))
    ),
    "grouped": Case(
        num_heads=8, num_k_heads=2, head_dim=64, v_head_dim=64, lengths=((17, 90), (40, 40))
    ),
    "one_head": Case(
        num_heads=1, num_k_heads=1, head_dim=16, v_head_dim=16, lengths=((7, 7), (0, 5), (1, 3))
    ),
    "no_keys": Case(
        num_heads=3,
        num_k_heads=1,
        head_dim=80,
        v_head_dim=48,
        lengths=((5, 0), (13, 37), (0, 0), (9, 4), (2, 0)),
    ),
    "long": Case(
        num_heads=2, num_k_heads=2, head_dim=32, v_head_dim=16, lengths=((131, 700), (300, 300))
    ),
}


def make_inputs(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    padding: tuple[int, int, int] = (0, 0, 0),
) -> Inputs:
    """Random inputs.

    Args:
        case: the shapes.
        dtype: of q, k and v.
        seed: of the values.
        padding: queries and keys (NaN), and empty sequences, to append.
    """
    generator = torch.Generator().manual_seed(seed)
    num_q, num_k = (sum(length[i] for length in case.lengths) for i in (0, 1))

    def rows(count: int, extra: int, heads: int, dim: int) -> Tensor:
        values = torch.randn(count, heads, dim, generator=generator)
        return torch.cat([values, torch.full((extra, heads, dim), math.nan)])

    lengths = [*case.lengths, *[(0, 0)] * padding[2]]
    return Inputs(
        q=rows(num_q, padding[0], case.num_heads, case.head_dim),
        k=rows(num_k, padding[1], case.num_k_heads, case.head_dim),
        v=rows(num_k, padding[1], case.num_k_heads, case.v_head_dim),
        cu_seqlens_q=offsets([q for q, _ in lengths]),
        cu_seqlens_k=offsets([k for _, k in lengths]),
        scale=case.head_dim**-0.5,
    ).to(dtype)
