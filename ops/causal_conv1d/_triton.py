# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": one launch for any mix of decode and extend."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.ragged import first_token_of_block, num_blocks, sequence_of_block

# Inputs that a program holds, and the least number of tokens among them. No block is shorter
# than a state, so that the first block of a sequence alone reads the state.
_TILE = 2048
_MIN_TOKENS = 8


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
) -> Tensor:
    """Launcher of ``torch_hybrid::causal_conv1d``."""
    num_tokens, num_channels = x.shape
    num_seqs, width = state_indices.shape[0], weight.shape[1]
    if num_seqs == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens_per_seq = triton.cdiv(num_tokens, num_seqs)
    block_t = min(32, max(_MIN_TOKENS, triton.next_power_of_2(tokens_per_seq)))
    rows = 1 if tokens_per_seq == 1 else block_t
    block_c = min(_TILE // rows, 512, triton.next_power_of_2(num_channels))
    grid = (num_blocks(num_tokens, num_seqs, block_t), triton.cdiv(num_channels, block_c))
    _conv_kernel[grid](
        x,
        weight,
        bias,
        conv_state,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        num_seqs,
        x.stride(0),
        C=num_channels,
        W=width,
        BLOCK_T=block_t,
        ROWS=rows,
        BLOCK_C=block_c,
        BLOCK_PAST=triton.next_power_of_2(width - 1),
        SILU=activation == "silu",
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    conv_state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PAST: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """One program: a block of tokens of one sequence, ROWS at a time, and a block of channels."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    row = tl.arange(0, ROWS)
    zeros = tl.zeros([ROWS, BLOCK_C], dtype=out.dtype.element_ty)

    # The grid has a block for any BLOCK_T tokens in a row: their padding is zeroed here.
    first_padding = tl.maximum(tl.load(cu_seqlens + num_seqs), tl.program_id(0) * BLOCK_T)
    last_padding = tl.minimum(num_tokens, (tl.program_id(0) + 1) * BLOCK_T)
    for start in range(first_padding, last_padding, ROWS):
        place = start + row
        p_zero = out + place.to(tl.int64)[:, None] * C + channel[None, :]
        tl.store(p_zero, zeros, mask=(place < last_padding)[:, None] & mask_c[None, :])

    seq = sequence_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_T)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first_token = first_token_of_block(begin, seq, tl.program_id(0), BLOCK_T)
    if first_token >= end:
        return
    initial = tl.load(initial_indices + seq).to(tl.int64)
    last = tl.minimum(first_token + BLOCK_T, end)
    known = initial != 0
    state = conv_state + initial * (W - 1) * C + channel
    for start in range(first_token, last, ROWS):
        token = start + row
        mask_out = (token < last)[:, None] & mask_c[None, :]
        b_o = tl.zeros([ROWS, BLOCK_C], dtype=tl.float32)
        if bias is not None:
            b_o += tl.load(bias + channel, mask=mask_c, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(W):
            source = token + (tap - W + 1)
            mask_x = (source >= begin) & (source < end)
            p_x = x + source.to(tl.int64)[:, None] * stride_x + channel[None, :]
            b_x = tl.load(p_x, mask=mask_x[:, None] & mask_c[None, :], other=0.0).to(tl.float32)
            if tap < W - 1:
                past = source - begin + (W - 1)
                mask_past = (source < begin) & known
                p_past = state[None, :] + past[:, None] * C
                b_past = tl.load(p_past, mask=mask_past[:, None] & mask_c[None, :], other=0.0)
                b_x += b_past.to(tl.float32)
            b_w = tl.load(weight + channel * W + tap, mask=mask_c, other=0.0).to(tl.float32)
            b_o += b_x * b_w[None, :]
        if SILU:
            b_o = b_o / (1.0 + tl.exp(-b_o))
        p_out = out + token.to(tl.int64)[:, None] * C + channel[None, :]
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_out)

    slot = tl.load(state_indices + seq).to(tl.int64)
    if (first_token == begin) & (slot != 0):
        # Read again, so that no register holds the place of the old state through the loop.
        initial = tl.load(initial_indices + seq).to(tl.int64)
        state = conv_state + initial * (W - 1) * C + channel
        known = initial != 0
        # The inputs at the last W - 1 places; those before the first token are in the old state.
        index = tl.arange(0, BLOCK_PAST)
        newest = end - (W - 1) + index
        mask_new = (index < W - 1)[:, None] & mask_c[None, :]
        mask_input = mask_new & (newest >= begin)[:, None]
        p_new = x + newest.to(tl.int64)[:, None] * stride_x + channel[None, :]
        b_input = tl.load(p_new, mask=mask_input, other=0.0)
        mask_older = mask_new & ((newest < begin) & known)[:, None]
        p_older = state[None, :] + (index + end - begin)[:, None] * C
        b_older = tl.load(p_older, mask=mask_older, other=0.0)
        tl.debug_barrier()  # all of the old state has been read, by whichever thread
        b_new = tl.where(mask_input, b_input, b_older)
        left = conv_state + slot * (W - 1) * C + channel
        tl.store(left[None, :] + index[:, None] * C, b_new, mask=mask_new)
