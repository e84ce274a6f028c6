# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": convolution, gates, recurrence and gated norm in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.state import zero_rows


def launch(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    scale: float,
    beta_scale: float,
    norm_eps: float,
    heads: int,
    block_v: int,
    num_warps: int,
    exact: bool = True,
    arrivals: Tensor | None = None,
) -> Tensor:
    num_tokens = qkv.shape[0]
    _, num_v_heads, head_dim_v, head_dim_k = state.shape
    num_k_heads = (qkv.shape[1] - num_v_heads * head_dim_v) // (2 * head_dim_k)
    num_seqs = state_indices.shape[0]
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    blocks = triton.cdiv(head_dim_v, block_v)
    _mixer_kernel[(num_seqs * (num_v_heads // heads) * blocks,)](
        qkv,
        z,
        b,
        a,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        arrivals,
        out,
        scale,
        beta_scale,
        norm_eps,
        num_tokens,
        num_seqs,
        qkv.stride(0),
        z.stride(0),
        b.stride(0),
        a.stride(0),
        H=num_k_heads,
        HV=num_v_heads,
        K=head_dim_k,
        V=head_dim_v,
        W=conv_weight.shape[1],
        HEADS=heads,
        BLOCK_K=triton.next_power_of_2(head_dim_k),
        BLOCK_V=block_v,
        SILU=activation == "silu",
        EXACT=exact,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _last_inputs(
    p_state: tl.tensor, mask: tl.tensor, C: tl.constexpr, W: tl.constexpr
) -> tl.tuple:
    """The W - 1 rows of a convolution's state, oldest first; zeros where masked."""
    rows = ()
    for row in tl.static_range(W - 1):
        b_x = tl.load(p_state + row * C, mask=mask, other=0.0)
        rows = rows + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@triton.jit
def _leave_inputs(
    p_state: tl.tensor, rows: tl.tuple, mask: tl.tensor, C: tl.constexpr, W: tl.constexpr
) -> None:
    for row in tl.static_range(W - 1):
        tl.store(p_state + row * C, rows[row], mask=mask)


@triton.jit
def _convolve(
    past: tl.tuple,
    b_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor | None,
    mask: tl.tensor,
    W: tl.constexpr,
    SILU: tl.constexpr,
) -> tl.tensor:
    """The convolution and activation of one token, rounded to the dtype of its input."""
    b_y = tl.zeros_like(b_x).to(tl.float32)
    if p_bias is not None:
        b_y += tl.load(p_bias, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(W):
        b_w = tl.load(p_weight + tap, mask=mask, other=0.0).to(tl.float32)
        if tap < W - 1:
            b_y += past[tap].to(tl.float32) * b_w
        else:
            b_y += b_x.to(tl.float32) * b_w
    if SILU:
        b_y = b_y / (1.0 + tl.exp(-b_y))
    return b_y.to(b_x.dtype).to(tl.float32)


@triton.jit
def _decay(a: tl.tensor, A_log: tl.tensor, dt_bias: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """e^g, where g = -e^A_log softplus(a + dt_bias)."""
    step = a.to(tl.float32) + dt_bias.to(tl.float32)
    if EXACT:
        wide = step.to(tl.float64)
        softplus = tl.where(step > 20.0, wide, tl.log(1.0 + tl.exp(wide)))
        return tl.exp(-tl.exp(A_log.to(tl.float64)) * softplus).to(tl.float32)
    softplus32 = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
    return tl.exp(-tl.exp(A_log.to(tl.float32)) * softplus32)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _mixer_kernel(
    qkv: tl.tensor,
    z: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor | None,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    norm_weight: tl.tensor,
    conv_state: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    arrivals: tl.tensor | None,
    out: tl.tensor,
    scale: tl.tensor,
    beta_scale: tl.tensor,
    norm_eps: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_z: tl.tensor,
    stride_b: tl.tensor,
    stride_a: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SILU: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """One program: BLOCK_V rows of the states of HEADS value heads of one sequence."""
    C: tl.constexpr = 2 * H * K + HV * V
    PARTS: tl.constexpr = HV // HEADS
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    SHARERS: tl.constexpr = HV // H // HEADS * BLOCKS
    pid = tl.program_id(0)
    seq = pid // (BLOCKS * PARTS)
    first_v = pid // BLOCKS % PARTS * HEADS
    head_k = first_v // (HV // H)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    mask_s = mask_v[:, None] & mask_k[None, :]

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    initial = tl.load(initial_indices + seq).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    if begin < end:
        known = initial != 0
        channel_q = head_k * K + index_k
        # Of constants and the thread alone, so that all its rows lie at constant distances.
        tile_s = index_v[:, None] * K + index_k[None, :]
        p_old = conv_state + initial * (W - 1) * C
        past_q = _last_inputs(p_old + channel_q, mask_k & known, C, W)
        past_k = _last_inputs(p_old + H * K + channel_q, mask_k & known, C, W)
        p_weight = conv_weight + channel_q * W
        p_bias = conv_bias
        p_bias_k = conv_bias
        if conv_bias is not None:
            p_bias = conv_bias + channel_q
            p_bias_k = conv_bias + H * K + channel_q
        end_q = past_q
        end_k = past_k
        for head in range(first_v, first_v + HEADS):
            channel_v = 2 * H * K + head * V + index_v
            p_s = state + (initial * HV + head) * V * K + tile_s
            b_s = tl.load(p_s, mask=mask_s & known, other=0.0)
            past_v = _last_inputs(p_old + channel_v, mask_v & known, C, W)
            p_weight_v = conv_weight + channel_v * W
            p_bias_v = conv_bias
            if conv_bias is not None:
                p_bias_v = conv_bias + channel_v
            now_q = past_q
            now_k = past_k
            first = begin.to(tl.int64)
            p_x = qkv + first * stride_x
            p_z = z + first * stride_z + head * V + index_v
            p_a = a + first * stride_a + head
            p_b = b + first * stride_b + head
            p_out = out + (first * HV + head) * V + index_v
            for token in range(begin, end):
                x_q = tl.load(p_x + channel_q, mask=mask_k, other=0.0)
                x_k = tl.load(p_x + H * K + channel_q, mask=mask_k, other=0.0)
                x_v = tl.load(p_x + channel_v, mask=mask_v, other=0.0)
                b_v = _convolve(past_v, x_v, p_weight_v, p_bias_v, mask_v, W, SILU)
                past_v = past_v[1:] + (x_v,)  # noqa: RUF005
                b_q = _convolve(now_q, x_q, p_weight, p_bias, mask_k, W, SILU)
                b_k = _convolve(now_k, x_k, p_weight + H * K * W, p_bias_k, mask_k, W, SILU)
                now_q = now_q[1:] + (x_q,)  # noqa: RUF005
                now_k = now_k[1:] + (x_k,)  # noqa: RUF005
                b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * scale
                b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
                decay = _decay(
                    tl.load(p_a), tl.load(A_log + head), tl.load(dt_bias + head), EXACT
                )
                beta = beta_scale / (1.0 + tl.exp(-tl.load(p_b).to(tl.float32)))
                b_s *= decay
                b_u = beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
                b_s += b_u[:, None] * b_k[None, :]
                b_o = tl.sum(b_s * b_q[None, :], 1)
                if BLOCKS == 1:
                    b_o = b_o.to(out.dtype.element_ty).to(tl.float32)
                    b_z = tl.load(p_z, mask=mask_v, other=0.0).to(tl.float32)
                    b_w = tl.load(norm_weight + index_v, mask=mask_v, other=0.0).to(tl.float32)
                    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / V + norm_eps)
                    b_o = b_o.to(out.dtype.element_ty).to(tl.float32)
                    b_o = (b_w * b_o).to(out.dtype.element_ty).to(tl.float32)
                    b_o *= b_z / (1.0 + tl.exp(-b_z))
                tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_v)
                p_x += stride_x
                p_z += stride_z
                p_a += stride_a
                p_b += stride_b
                p_out += HV * V
            end_q = now_q
            end_k = now_k
            if slot != 0:
                tl.store(state + (slot * HV + head) * V * K + tile_s, b_s, mask=mask_s)
                tl.debug_barrier()
                p_left = conv_state + slot * (W - 1) * C + channel_v
                _leave_inputs(p_left, past_v, mask_v, C, W)
        tl.debug_barrier()  # all threads of this program have read the old inputs
        owns_keys = True
        if SHARERS > 1:
            p_arrived = arrivals + seq * H + head_k
            owns_keys = tl.atomic_add(p_arrived, 1, sem="acq_rel") == SHARERS - 1
        if slot != 0:
            p_left = conv_state + slot * (W - 1) * C + channel_q
            _leave_inputs(p_left, end_q, mask_k & owns_keys, C, W)
            _leave_inputs(p_left + H * K, end_k, mask_k & owns_keys, C, W)
        if SHARERS > 1:
            if owns_keys:
                tl.store(p_arrived, 0)

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    for i in tl.static_range(HEADS):
        zero_rows(out, padding, num_tokens, num_seqs, first_v + i, index_v, mask_v, HV, V)
