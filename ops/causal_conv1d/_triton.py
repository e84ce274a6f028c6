"""Implementation "triton": one launch for any mix of decode and extend."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.causal_conv1d.op import CausalConv1d
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block

# Tokens of a program, and how many of them are fetched at once. No block is shorter than a state,
# so that the first block of a sequence alone reads the state.
_MOST_TOKENS = 32
_FETCHED = 8


def causal_conv1d(x: CausalConv1d) -> Tensor:
    """Launch ``torch_hybrid::causal_conv1d``."""
    num_tokens, num_channels = x.x.shape
    num_seqs, width = x.state_indices.shape[0], x.weight.shape[1]
    if num_seqs == 0:
        return torch.zeros_like(x.x, memory_format=torch.contiguous_format)
    out = torch.empty_like(x.x, memory_format=torch.contiguous_format)
    tokens_per_seq = triton.cdiv(num_tokens, num_seqs)
    fewest = max(_FETCHED, triton.next_power_of_2(width - 1))
    block_t = min(_MOST_TOKENS, max(fewest, triton.next_power_of_2(tokens_per_seq)))
    rows = 1 if tokens_per_seq == 1 else _FETCHED
    block_c = min(512 if rows == 1 else 128, triton.next_power_of_2(num_channels))
    grid = (num_blocks(num_tokens, num_seqs, block_t), triton.cdiv(num_channels, block_c))
    bind(_conv_kernel, x)[grid](
        out=out,
        HEADS=x.num_heads,
        ONE_HEAD=num_channels // x.num_heads % block_c == 0,
        BLOCK_T=block_t,
        ROWS=rows,
        BLOCK_C=block_c,
        BLOCK_PAST=triton.next_power_of_2(width - 1),
        num_warps=max(1, block_c // 128),
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _conv_kernel(
    x: tl.tensor,
    input_gate: tl.tensor | None,
    output_gate: tl.tensor | None,
    token_taps: tl.tensor | None,
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
    stride_input_gate: tl.tensor,
    stride_output_gate: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    ONE_HEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PAST: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Convolve a block of tokens of one sequence and a block of channels.

    A program walks the tokens, of which it fetches ROWS at once, and keeps the last W - 1 inputs.
    An input is what the state keeps: where there is a gate, a rounded product.
    """
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

    seq, begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_T)
    if first_token >= end:
        return
    initial = tl.load(initial_indices + seq).to(tl.int64)
    last = tl.minimum(first_token + BLOCK_T, end)
    known = initial != 0
    state = conv_state + initial * (W - 1) * C + channel
    b_bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + channel, mask=mask_c, other=0.0).to(tl.float32)
    taps = ()
    for tap in tl.static_range(W):
        b_w = tl.load(weight + channel * W + tap, mask=mask_c, other=0.0)
        taps = taps + (b_w.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    past = ()
    for back in tl.static_range(W - 1, 0, -1):
        source = (first_token - back).to(tl.int64)
        p_x = x + source * stride_x + channel
        is_here = mask_c & (source >= begin)
        b_x = tl.load(p_x, mask=is_here, other=0.0)
        if input_gate is not None:
            b_x = _product(b_x, input_gate + source * stride_input_gate + channel, is_here)
        is_past = mask_c & (source < begin) & known
        b_past = tl.load(state + (source - begin + W - 1) * C, mask=is_past, other=0.0)
        past = past + (b_x.to(tl.float32) + b_past.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    head = channel // (C // HEADS)
    if ONE_HEAD:  # of all channels: its taps are loaded once
        head = tl.program_id(1) * BLOCK_C // (C // HEADS)
    for start in range(first_token, last, ROWS):
        seen = past
        added = ()
        for place in tl.static_range(ROWS):
            token = tl.cast(start + place, tl.int64)
            is_here = mask_c & (start + place < last)
            b_x = tl.load(x + stride_x * token + channel, mask=is_here, other=0.0)
            if input_gate is not None:
                p_gate = input_gate + stride_input_gate * token + channel
                b_x = _product(b_x, p_gate, is_here)
            seen = seen + (b_x.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            if token_taps is not None:
                has_taps = start + place < last
                if not ONE_HEAD:
                    has_taps = is_here
                p_taps = token_taps + (token * HEADS + head) * W
                for tap in tl.static_range(W):
                    b_tap = tl.load(p_taps + tap, mask=has_taps, other=0.0)
                    added = added + (b_tap.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for place in tl.static_range(ROWS):
            b_o = b_bias
            for tap in tl.static_range(W):
                if token_taps is not None:
                    b_o += seen[place + tap] * (taps[tap] + added[place * W + tap])
                else:
                    b_o += seen[place + tap] * taps[tap]
            if SILU:
                b_o = b_o / (1.0 + tl.exp(-b_o))
            token = tl.cast(start + place, tl.int64)
            is_here = mask_c & (start + place < last)
            if output_gate is not None:
                p_gate = output_gate + stride_output_gate * token + channel
                b_o *= tl.load(p_gate, mask=is_here, other=0.0).to(tl.float32)
            tl.store(out + token * C + channel, b_o.to(out.dtype.element_ty), mask=is_here)
        past = seen[ROWS:]  # type: ignore[assignment]

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
        if input_gate is not None:
            p_gate = (
                input_gate + newest.to(tl.int64)[:, None] * stride_input_gate + channel[None, :]
            )
            b_input = _product(b_input, p_gate, mask_input)
        mask_older = mask_new & ((newest < begin) & known)[:, None]
        p_older = state[None, :] + (index + end - begin)[:, None] * C
        b_older = tl.load(p_older, mask=mask_older, other=0.0)
        tl.debug_barrier()  # all of the old state has been read, by whichever thread
        b_new = tl.where(mask_input, b_input, b_older)
        left = conv_state + slot * (W - 1) * C + channel
        tl.store(left[None, :] + index[:, None] * C, b_new, mask=mask_new)


@triton.jit
def _product(b_x: tl.tensor, p_gate: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Multiply inputs by their gates, as the state keeps what is convolved."""
    b_gate = tl.load(p_gate, mask=mask, other=0.0)
    return (b_x.to(tl.float32) * b_gate.to(tl.float32)).to(b_x.dtype)
