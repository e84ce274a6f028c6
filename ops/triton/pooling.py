"""Keys of blocks of tokens, of the keys and gates of tokens that are new or that a slot has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of_block(
    new: tl.tensor,
    stride: tl.tensor,
    held: tl.tensor,
    token: tl.tensor,
    begin: tl.tensor,
    place: tl.tensor,
    index_d: tl.tensor,
    mask: tl.tensor,
    is_known: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:
    """Load a block's rows [BLOCK, BLOCK_D]: new tokens, and those that the slot holds, by place."""
    is_new = (token >= begin)[:, None]
    p_new = new + token.to(tl.int64)[:, None] * stride + index_d[None, :]
    p_held = held + place[:, None] * (2 * D) + index_d[None, :]
    b_new = tl.load(p_new, mask=mask & is_new, other=0.0)
    return tl.where(is_new, b_new, tl.load(p_held, mask=mask & ~is_new & is_known, other=0.0))


@triton.jit
def pool(
    b_key: tl.tensor, b_gate: tl.tensor, b_bias: tl.tensor, place: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Average a block's keys to float32 [BLOCK_D], weighed by the softmax of gates plus biases.

    Places from SIZE on do not count.
    """
    logits = b_gate.to(tl.float32) + b_bias.to(tl.float32)
    logits = tl.where((place < SIZE)[:, None], logits, -float("inf"))
    weights = tl.exp(logits - tl.max(logits, 0)[None, :])
    return tl.sum(weights * b_key.to(tl.float32), 0) / tl.sum(weights, 0)
