# mypy: disable-error-code="untyped-decorator"
"""What logits are biased by, of each query by the distance of a key."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


def reach_of(relative_bias: Tensor | None) -> int:
    """Distances that have a bias: 0 where there are none."""
    return 0 if relative_bias is None else relative_bias.shape[2]


@triton.jit
def biases_of_rows(
    relative_bias: tl.tensor,
    first_token: tl.tensor,
    row: tl.tensor,
    mask: tl.tensor,
    head_kv: tl.tensor,
    HQ: tl.constexpr,
    GROUP: tl.constexpr,
    REACH: tl.constexpr,
) -> tl.tensor:
    """[rows] where the biases of each row begin, of tokens from ``first_token`` on times the query
    heads of one key head; rows that ``mask`` hides have those of some other."""
    first = (first_token.to(tl.int64) * HQ + head_kv * GROUP) * REACH
    offset = (row // GROUP * HQ + row % GROUP) * REACH
    return relative_bias + first + tl.where(mask, offset, 0)


@triton.jit
def biases_by_key(
    biases: tl.tensor, position: tl.tensor, key: tl.tensor, REACH: tl.constexpr
) -> tl.tensor:
    """[rows, keys] float32: the biases of keys, 0 of those that are REACH before a row or more.

    To be added where keys have been hidden: to a bare product the compiler adds them first, and
    each of its sums is then rounded at their size.
    """
    distance = position[:, None] - key[None, :]
    is_near = (distance >= 0) & (distance < REACH)
    return tl.load(biases[:, None] + distance, mask=is_near, other=0.0).to(tl.float32)
