# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": one launch for any mix of decode and extend."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FETCHED = 8  # tokens of a sequence that are fetched at once
_MOST_CHANNELS = 128


def rg_lru(
    x: Tensor,
    gates: Tensor,
    log_a: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """Launcher of ``torch_hybrid::rg_lru``."""
    num_tokens, num_channels = x.shape
    num_seqs = state_indices.shape[0]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block_c = min(_MOST_CHANNELS, triton.next_power_of_2(num_channels))
    # One program more for each block of channels, for padding.
    grid = (num_seqs + 1, triton.cdiv(num_channels, block_c))
    _rg_lru_kernel[grid](
        x,
        gates,
        log_a,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        num_seqs,
        x.stride(0),
        gates.stride(0),
        gates.stride(1),
        C=num_channels,
        D=num_channels // gates.shape[1],
        ROWS=1 if num_tokens <= num_seqs else _FETCHED,
        BLOCK_C=block_c,
        num_warps=max(1, block_c // 32),
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _rg_lru_kernel(
    x: tl.tensor,
    gates: tl.tensor,
    log_a: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_gates: tl.tensor,
    stride_gates_head: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program: a sequence and a block of channels.

    It walks the tokens, of which it fetches ROWS at once, the state in registers.
    """
    seq = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    if seq == num_seqs:
        zeros = tl.zeros([BLOCK_C], dtype=out.dtype.element_ty)
        for token in range(tl.load(cu_seqlens + num_seqs), num_tokens):
            tl.store(out + tl.cast(token, tl.int64) * C + channel, zeros, mask=mask_c)
        return
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if begin == end:
        return
    initial = tl.load(initial_indices + seq).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    known = initial != 0
    p_gate = gates + (channel // D).to(tl.int64) * stride_gates_head + channel % D
    b_log_a = tl.load(log_a + channel, mask=mask_c, other=0.0)
    b_h = tl.load(state + initial * C + channel, mask=mask_c & known, other=0.0)
    for start in range(begin, end, ROWS):
        fetched_x = ()
        fetched_input = ()
        fetched_recurrent = ()
        for place in tl.static_range(ROWS):
            token = tl.cast(start + place, tl.int64)
            mask = mask_c & (start + place < end)
            p_input = p_gate + token * stride_gates
            b_x = tl.load(x + token * stride_x + channel, mask=mask, other=0.0)
            b_input = tl.load(p_input, mask=mask, other=0.0)
            b_recurrent = tl.load(p_input + D, mask=mask, other=0.0)
            fetched_x = fetched_x + (b_x.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            fetched_input = fetched_input + (b_input.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            fetched_recurrent = fetched_recurrent + (b_recurrent.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for place in tl.static_range(ROWS):
            token = tl.cast(start + place, tl.int64)
            is_here = start + place < end
            b_log_decay = tl.sigmoid(fetched_recurrent[place]) * b_log_a
            b_decay = tl.exp(b_log_decay)
            b_scale = tl.sqrt(_one_minus_square(b_decay, 2.0 * b_log_decay))
            b_scale = tl.where((start + place == begin) & (not known), 1.0, b_scale)
            b_added = b_scale * tl.sigmoid(fetched_input[place]) * fetched_x[place]
            b_h = tl.where(is_here, b_decay * b_h + b_added, b_h)
            p_out = out + token * C + channel
            tl.store(p_out, b_h.to(out.dtype.element_ty), mask=mask_c & is_here)
    tl.store(state + slot * C + channel, b_h, mask=mask_c & (slot != 0))


@triton.jit
def _one_minus_square(a: tl.tensor, x: tl.tensor) -> tl.tensor:
    """1 - a^2 of a = e^(x / 2) for x <= 0. Near 0, where the difference has no digits left, by the
    series of e^x."""
    series = 1.0 + x * (1.0 / 8)
    for divisor in tl.static_range(7, 1, -1):
        series = 1.0 + x * series * (1.0 / divisor)
    return tl.where(x > -0.5, -x * series, 1.0 - a * a)
