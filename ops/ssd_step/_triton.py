# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": a program for each block of a head's state; norms in a second launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.conv_step import convolve, last_inputs, leave_inputs, taps
from torch_hybrid.ops.triton.decays import exp, softplus
from torch_hybrid.ops.triton.state import Tile, zero_rows


def ssd_step(
    xBC: Tensor,
    z: Tensor | None,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    norm_weight: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    dt_min: float,
    dt_max: float,
    norm_before_gate: bool,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """Launcher of ``torch_hybrid::ssd_step``."""
    num_tokens, num_channels = xBC.shape
    _, num_heads, head_dim_v, head_dim_k = state.shape
    inner = num_heads * head_dim_v
    num_groups = (num_channels - inner) // (2 * head_dim_k)
    num_seqs = state_indices.shape[0]
    if num_seqs == 0:
        return xBC.new_zeros(num_tokens, inner)
    out = xBC.new_empty(num_tokens, inner)
    tile = Tile.of(head_dim_v, head_dim_k)
    num_blocks = triton.cdiv(head_dim_v, tile.block_v)
    arrivals = state_indices.new_zeros(num_seqs * num_groups)
    _step_kernel[(num_blocks * num_heads * num_seqs,)](
        xBC,
        z if norm_weight is None else None,
        dt,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        D,
        conv_state,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        arrivals,
        out,
        dt_min,
        dt_max,
        num_tokens,
        num_seqs,
        xBC.stride(0),
        0 if z is None else z.stride(0),
        dt.stride(0),
        G=num_groups,
        H=num_heads,
        K=head_dim_k,
        V=head_dim_v,
        W=conv_weight.shape[1],
        BLOCK_K=tile.block_k,
        BLOCK_V=tile.block_v,
        SILU=activation == "silu",
        num_warps=1,
        enable_fp_fusion=True,
    )
    if norm_weight is not None:
        assert z is not None
        width = inner // norm_groups
        block = triton.next_power_of_2(width)
        _norm_kernel[(num_tokens * norm_groups,)](
            out,
            z,
            norm_weight,
            cu_seqlens,
            norm_eps,
            num_seqs,
            z.stride(0),
            GROUPS=norm_groups,
            WIDTH=width,
            BLOCK=block,
            BEFORE_GATE=norm_before_gate,
            num_warps=min(16, max(1, block // 512)),
        )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _step_kernel(
    xBC: tl.tensor,
    z: tl.tensor | None,
    dt: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor | None,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    D: tl.tensor,
    conv_state: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    arrivals: tl.tensor,
    out: tl.tensor,
    dt_min: tl.tensor,
    dt_max: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_z: tl.tensor,
    stride_dt: tl.tensor,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """One program: BLOCK_V rows of the state of one head of one sequence."""
    C: tl.constexpr = H * V + 2 * G * K
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    ARRIVING: tl.constexpr = BLOCKS * (H // G)
    pid = tl.program_id(0)
    seq = pid // (BLOCKS * H)
    head = pid // BLOCKS % H
    group = head // (H // G)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    mask_s = mask_v[:, None] & mask_k[None, :]

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if begin < end:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        known = initial != 0
        kept = slot != 0
        token = begin.to(tl.int64)
        p_x = xBC + token * stride_x
        p_old = conv_state + initial * (W - 1) * C
        channel_x = head * V + index_v
        channel_b = H * V + group * K + index_k
        # What is small is asked for first: it does not wait for the state's bytes then.
        x_dt = tl.load(dt + token * stride_dt + head).to(tl.float32)
        x_dt += tl.load(dt_bias + head).to(tl.float32)
        rate = tl.load(A_log + head).to(tl.float32)
        skip = tl.load(D + head).to(tl.float32)
        x_b = tl.load(p_x + channel_b, mask=mask_k, other=0.0)
        x_c = tl.load(p_x + G * K + channel_b, mask=mask_k, other=0.0)
        x_x = tl.load(p_x + channel_x, mask=mask_v, other=0.0)
        past_b = last_inputs(p_old + channel_b, mask_k & known, C, W)
        past_c = last_inputs(p_old + G * K + channel_b, mask_k & known, C, W)
        past_x = last_inputs(p_old + channel_x, mask_v & known, C, W)
        tap_b = taps(conv_weight, conv_bias, channel_b, mask_k, W)
        tap_c = taps(conv_weight, conv_bias, G * K + channel_b, mask_k, W)
        tap_x = taps(conv_weight, conv_bias, channel_x, mask_v, W)
        if z is not None:
            b_z = tl.load(z + token * stride_z + channel_x, mask=mask_v, other=0.0).to(tl.float32)
        tile_s = head * V * K + index_v[:, None] * K + index_k[None, :]
        p_s = state + initial * H * V * K + tile_s
        b_s = tl.load(p_s, mask=mask_s & known, other=0.0)

        step = softplus(x_dt)
        step = tl.minimum(
            tl.maximum(step, dt_min, tl.PropagateNan.ALL), dt_max, tl.PropagateNan.ALL
        )
        decay = exp(-exp(rate) * step)
        b_x = convolve(past_x, x_x, tap_x, W, SILU)
        b_b = convolve(past_b, x_b, tap_b, W, SILU)
        b_c = convolve(past_c, x_c, tap_c, W, SILU)
        b_u = b_x * step
        b_s = b_s * decay + b_u[:, None] * b_b[None, :]
        b_o = tl.sum(b_s * b_c[None, :], 1) + skip * b_x

        # All programs of a group read its inputs before the token; the last of them moves them.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + seq * G + group, 1, sem="acq_rel")
        tl.store(state + slot * H * V * K + tile_s, b_s, mask=mask_s & kept)
        b_o = b_o.to(out.dtype.element_ty)
        if z is not None:
            b_o = b_o.to(tl.float32) * b_z / (1.0 + tl.exp(-b_z))
        tl.store(out + token * H * V + channel_x, b_o.to(out.dtype.element_ty), mask=mask_v)
        p_new = conv_state + slot * (W - 1) * C
        leave_inputs(p_new + channel_x, past_x[1:] + (x_x,), mask_v & kept, C, W)  # noqa: RUF005
        if arrived == ARRIVING - 1:
            tl.store(arrivals + seq * G + group, 0)
            leave_inputs(p_new + channel_b, past_b[1:] + (x_b,), mask_k & kept, C, W)  # noqa: RUF005
            p_new += G * K
            leave_inputs(p_new + channel_b, past_c[1:] + (x_c,), mask_k & kept, C, W)  # noqa: RUF005

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, H, V)


@triton.jit(do_not_specialize=["num_seqs"])
def _norm_kernel(
    out: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    cu_seqlens: tl.tensor,
    eps: tl.tensor,
    num_seqs: tl.tensor,
    stride_z: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE_GATE: tl.constexpr,
) -> None:
    """One program: the gate and the norm of one group of a token's channels, in place."""
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    index = tl.arange(0, BLOCK)
    # Rows of padding stay zeros, whatever their gates are.
    mask = (index < WIDTH) & (token < tl.load(cu_seqlens + num_seqs))
    channel = tl.program_id(0) % GROUPS * WIDTH + index
    p_out = out + token * GROUPS * WIDTH + channel
    b_y = tl.load(p_out, mask=mask, other=0.0).to(tl.float32)
    b_z = tl.load(z + token * stride_z + channel, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    gate = b_z / (1.0 + tl.exp(-b_z))
    if not BEFORE_GATE:
        b_y *= gate
    b_y = b_w * (b_y * tl.rsqrt(tl.sum(b_y * b_y, 0) / WIDTH + eps))
    if BEFORE_GATE:
        b_y *= gate
    tl.store(p_out, b_y.to(out.dtype.element_ty), mask=mask)
