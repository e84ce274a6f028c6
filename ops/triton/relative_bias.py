# mypy: disable-error-code="untyped-decorator"
"""What logits are biased by, of each query by the distance of a key."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.decays import LOG2_E


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
def with_biases(
    products: tl.tensor,
    scale_log2: tl.tensor,
    biases: tl.tensor,
    position: tl.tensor,
    key: tl.tensor,
    REACH: tl.constexpr,
) -> tl.tensor:
    """[rows, keys] logits to base 2: of products, and the biases of keys less than REACH before.

    Not in units of products: those the compiler would sum from the biases on, and round each of
    their terms at the size of a bias.
    """
    distance = position[:, None] - key[None, :]
    is_near = (distance >= 0) & (distance < REACH)
    b_bias = tl.load(biases[:, None] + distance, mask=is_near, other=0.0).to(tl.float32)
    return products * scale_log2 + b_bias * LOG2_E
