"""Biases of attention logits, which each query has by the distance to a key."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.decays import LOG2_E


def reach_of(relative_bias: Tensor | None) -> int:
    """Return how many distances have a bias; 0 without biases."""
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
    """Return a pointer to each row's biases; a row is a token and one query head of a key head.

    Rows count from ``first_token`` on. Masked rows point to another row's biases.
    """
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
    """Compute base-2 logits [rows, keys]: scaled products, and biases of keys less than REACH
    before.

    Biases are not added in units of products: the compiler would then begin the sum with the bias,
    and round each product at the bias's size.
    """
    distance = position[:, None] - key[None, :]
    is_near = (distance >= 0) & (distance < REACH)
    b_bias = tl.load(biases[:, None] + distance, mask=is_near, other=0.0).to(tl.float32)
    return products * scale_log2 + b_bias * LOG2_E
