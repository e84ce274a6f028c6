"""Implementation "triton": a program for each token; one keeps what its sequence leaves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.gated_pooling.op import GatedPooling
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.pooling import pool, rows_of_block
from torch_hybrid.ops.triton.ragged import sequence_of_token


def gated_pooling(x: GatedPooling) -> Tensor:
    """Launch ``torch_hybrid::gated_pooling``."""
    (num_tokens, dim), size = x.keys.shape, x.bias.shape[0]
    num_seqs = x.state_indices.shape[0]
    out = torch.empty(x.keys.shape, dtype=x.keys.dtype, device=x.keys.device)
    if num_tokens == 0 or num_seqs == 0:
        return out.zero_()
    block_d = min(128, triton.next_power_of_2(dim))
    bind(_pool_kernel, x)[(num_tokens, triton.cdiv(dim, block_d))](
        out=out,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def _pool_kernel(
    keys: tl.tensor,
    gates: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    num_seqs: tl.tensor,
    stride_keys: tl.tensor,
    stride_gates: tl.tensor,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Pool the block that one token completes, and keep the tokens of the block after it.

    Grid: (tokens, channels / BLOCK_D). Tile: SIZE rows of keys and gates by BLOCK_D channels, from
    the new tokens and from the slot.

    One token alone reads what its sequence's slot holds: the first that completes a block. That
    program then writes the slot; if no token completes a block, the last token's does.
    """
    token = tl.program_id(0)
    index_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = index_d < D
    p_out = out + token.to(tl.int64) * D + index_d
    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    if seq >= num_seqs:
        tl.store(p_out, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=mask_d)
        return
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    length = tl.load(seq_lens + seq)
    initial = tl.load(initial_indices + seq).to(tl.int64)
    held = state + initial * ((SIZE - 1) * 2 * D)
    place = tl.arange(0, BLOCK)
    is_last = (length - end + token + 1) % SIZE == 0
    if is_last:
        source = token - (SIZE - 1) + place
        mask = (place < SIZE)[:, None] & mask_d[None, :]
        # All on their way before any of them is waited for.
        b_gate = rows_of_block(
            gates, stride_gates, held + D, source, begin, place, index_d, mask, initial != 0, D
        )
        b_key = rows_of_block(
            keys, stride_keys, held, source, begin, place, index_d, mask, initial != 0, D
        )
        b_bias = tl.load(bias + place[:, None] * D + index_d[None, :], mask=mask, other=0.0)
        b_out = pool(b_key, b_gate, b_bias, place, SIZE)
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=mask_d)
    else:
        tl.store(p_out, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=mask_d)

    slot = tl.load(state_indices + seq).to(tl.int64)
    left = length % SIZE
    first_complete = begin + SIZE - 1 - (length - (end - begin)) % SIZE
    if (slot == 0) | (left == 0) | (token != tl.minimum(first_complete, end - 1)):
        return
    mask = (place < left)[:, None] & mask_d[None, :]
    source = end - left + place
    b_key = rows_of_block(
        keys, stride_keys, held, source, begin, place, index_d, mask, initial != 0, D
    )
    b_gate = rows_of_block(
        gates, stride_gates, held + D, source, begin, place, index_d, mask, initial != 0, D
    )
    tl.debug_barrier()  # all of the slot that is read has been
    p_state = state + slot * ((SIZE - 1) * 2 * D) + place[:, None] * (2 * D) + index_d[None, :]
    tl.store(p_state, b_key, mask=mask)
    tl.store(p_state + D, b_gate, mask=mask)
