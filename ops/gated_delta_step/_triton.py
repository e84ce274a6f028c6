# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of both steps: one launch, a program for each key head of a sequence."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.conv_step import (
    convolve,
    last_inputs,
    leave_channels,
    leave_inputs,
    taps,
)
from torch_hybrid.ops.triton.decays import exp, softplus
from torch_hybrid.ops.triton.delta_step import (
    cut_in_pieces,
    launch_step,
    launch_verify,
    leave_state,
    load_state,
    read_state,
    unit,
)
from torch_hybrid.ops.triton.state import zero_rows


def gated_delta_step(*tensors: Tensor | None, activation: str, **options: Any) -> Tensor:
    """Launcher of ``torch_hybrid::gated_delta_step``."""
    return launch_step(_step_kernel, *tensors, activation=activation, **_given(**options))


def gated_delta_verify(*tensors: Tensor | None, activation: str, **options: Any) -> Tensor:
    """Launcher of ``torch_hybrid::gated_delta_verify``."""
    return launch_verify(_verify_kernel, *tensors, activation=activation, **_given(**options))


def _given(scale: float, beta_scale: float, norm_eps: float, gate: str = "silu") -> dict[str, Any]:
    """The op's options as the kernels take them."""
    return {
        "numbers": (scale, beta_scale, norm_eps),
        "constants": {"SIGMOID_GATE": gate == "sigmoid"},
    }


@triton.jit
def _gates(x_a: tl.tensor, x_b: tl.tensor, rate: tl.tensor, beta_scale: tl.tensor) -> tl.tuple:
    """A head's decay and step size at one token."""
    return exp(-exp(rate) * softplus(x_a)), beta_scale / (1.0 + tl.exp(-x_b))


@triton.jit
def _correction(
    states: tl.tuple,
    parts_k: tl.tuple,
    b_v: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    HALVINGS: tl.constexpr,
) -> tl.tensor:
    """What a token adds to a head's state along its key."""
    return beta * (b_v - decay * read_state(states, parts_k, HALVINGS))


@triton.jit
def _advanced(b_s: tl.tensor, b_k: tl.tensor, b_u: tl.tensor, decay: tl.tensor) -> tl.tensor:
    """A piece of a head's state after one token."""
    return tl.fma(b_u[:, None], b_k[None, :], b_s * decay)


@triton.jit
def _gated_norm(
    b_o: tl.tensor,
    b_w: tl.tensor,
    b_z: tl.tensor,
    norm_eps: tl.tensor,
    V: tl.constexpr,
    dtype: tl.constexpr,
    SIGMOID: tl.constexpr,
) -> tl.tensor:
    """o over its root mean square, rounded, then weighted, rounded, then gated."""
    b_o = b_o.to(dtype).to(tl.float32)
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / V + norm_eps)
    b_o = b_o.to(dtype).to(tl.float32) * b_w.to(tl.float32)
    if b_w.dtype == dtype:
        b_o = b_o.to(dtype).to(tl.float32)
    b_z = b_z.to(tl.float32)
    if not SIGMOID:
        b_o *= b_z
    return b_o / (1.0 + tl.exp(-b_z))


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _step_kernel(
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HALVINGS: tl.constexpr,
    SILU: tl.constexpr,
    SIGMOID_GATE: tl.constexpr,
) -> None:
    """One program: a key head of one sequence and its value heads, one after the other.

    It alone reads and writes their channels of the convolution's state, which therefore may move
    in place.
    """
    C: tl.constexpr = 2 * H * K + HV * V
    HEADS: tl.constexpr = HV // H
    P: tl.constexpr = 1 << HALVINGS
    LANES: tl.constexpr = BLOCK_K // P
    seq = tl.program_id(0) // H
    head_k = tl.program_id(0) % H
    # The state comes in P pieces of LANES columns: element e of q and k is of piece e % P.
    element = tl.arange(0, BLOCK_K)
    index_k = element % P * LANES + element // P
    lane = tl.arange(0, LANES)
    index_v = tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    first_v = head_k * HEADS

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    initial = tl.load(initial_indices + seq).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    if begin < end:
        known = initial != 0
        kept = slot != 0
        token = begin.to(tl.int64)
        p_x = qkv + token * stride_x
        p_old = conv_state + initial * (W - 1) * C
        channel_q = head_k * K + index_k
        # Of constants and the thread alone, so that all its rows lie at constant distances.
        tile_s = index_v[:, None] * K + lane[None, :]
        # What is small is asked for first: it does not wait for the state's bytes then.
        x_q = tl.load(p_x + channel_q, mask=mask_k, other=0.0)
        x_k = tl.load(p_x + H * K + channel_q, mask=mask_k, other=0.0)
        past_q = last_inputs(p_old + channel_q, mask_k & known, C, W)
        past_k = last_inputs(p_old + H * K + channel_q, mask_k & known, C, W)
        tap_q = taps(conv_weight, conv_bias, channel_q, mask_k, W)
        tap_k = taps(conv_weight, conv_bias, H * K + channel_q, mask_k, W)
        for head in range(first_v, first_v + HEADS):
            x_a = tl.load(a + token * stride_a + head).to(tl.float32)
            x_b = tl.load(b + token * stride_b + head).to(tl.float32)
            rate = tl.load(A_log + head).to(tl.float32)
            x_a += tl.load(dt_bias + head).to(tl.float32)
            channel_v = 2 * H * K + head * V + index_v
            x_v = tl.load(p_x + channel_v, mask=mask_v, other=0.0)
            past_v = last_inputs(p_old + channel_v, mask_v & known, C, W)
            tap_v = taps(conv_weight, conv_bias, channel_v, mask_v, W)
            b_z = tl.load(z + token * stride_z + head * V + index_v, mask=mask_v, other=0.0)
            b_w = tl.load(norm_weight + index_v, mask=mask_v, other=0.0)
            p_s = state + (initial * HV + head) * V * K + tile_s
            states = load_state(p_s, mask_v & known, K, LANES, HALVINGS)

            decay, beta = _gates(x_a, x_b, rate, beta_scale)
            b_v = convolve(past_v, x_v, tap_v, W, SILU)
            b_q = convolve(past_q, x_q, tap_q, W, SILU)
            b_k = convolve(past_k, x_k, tap_k, W, SILU)
            parts_q = cut_in_pieces(unit(b_q, scale), HALVINGS)
            parts_k = cut_in_pieces(unit(b_k, 1.0), HALVINGS)
            b_u = _correction(states, parts_k, b_v, decay, beta, HALVINGS)
            p_left = state + (slot * HV + head) * V * K + tile_s
            read = tl.zeros([BLOCK_V, LANES], dtype=tl.float32)
            for piece in tl.static_range(P):
                b_s = _advanced(states[piece], parts_k[piece], b_u, decay)
                read = tl.fma(b_s, parts_q[piece][None, :], read)
                mask_s = mask_v[:, None] & (piece * LANES + lane < K)[None, :]
                tl.store(p_left + piece * LANES, b_s, mask=mask_s & kept)
            b_o = tl.sum(read, 1)
            b_o = _gated_norm(b_o, b_w, b_z, norm_eps, V, out.dtype.element_ty, SIGMOID_GATE)
            p_out = out + (token * HV + head) * V + index_v
            tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_v)
            tl.debug_barrier()  # all threads of this program have read what is left anew here
            p_new = conv_state + slot * (W - 1) * C + channel_v
            leave_inputs(p_new, past_v[1:] + (x_v,), mask_v & kept, C, W)  # noqa: RUF005
        p_new = conv_state + slot * (W - 1) * C + channel_q
        leave_inputs(p_new, past_q[1:] + (x_q,), mask_k & kept, C, W)  # noqa: RUF005
        leave_inputs(p_new + H * K, past_k[1:] + (x_k,), mask_k & kept, C, W)  # noqa: RUF005

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    for head in range(first_v, first_v + HEADS):
        zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, HV, V)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _verify_kernel(
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
    records: tl.tensor,
    accepted: tl.tensor,
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HALVINGS: tl.constexpr,
    SILU: tl.constexpr,
    DRAFTS: tl.constexpr,
    SIGMOID_GATE: tl.constexpr,
) -> None:
    """One program: a key head of one sequence and its value heads, one after the other.

    A state is loaded once, goes through the accepted records and the new tokens in registers, and
    is stored after the first of these. What is left of inputs is stored last: this program alone
    reads and writes its channels, and its columns of b and a in records.
    """
    C: tl.constexpr = 2 * H * K + HV * V
    R: tl.constexpr = C + 2 * HV
    HEADS: tl.constexpr = HV // H
    P: tl.constexpr = 1 << HALVINGS
    LANES: tl.constexpr = BLOCK_K // P
    seq = tl.program_id(0) // H
    head_k = tl.program_id(0) % H
    element = tl.arange(0, BLOCK_K)
    index_k = element % P * LANES + element // P
    lane = tl.arange(0, LANES)
    index_v = tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    first_v = head_k * HEADS

    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    num_replayed = tl.load(accepted + seq)
    initial = tl.load(initial_indices + seq).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    if num_new + num_replayed > 0:
        known = initial != 0
        kept = slot != 0
        token = begin.to(tl.int64)
        p_x = qkv + token * stride_x
        p_old = conv_state + initial * (W - 1) * C
        p_left = conv_state + slot * (W - 1) * C
        p_replayed = records + initial * DRAFTS * R
        p_drafts = records + slot * DRAFTS * R
        last_certain = num_replayed + tl.minimum(num_new, 1) - 1
        channel_q = head_k * K + index_k
        channel_k = H * K + channel_q
        tile_s = index_v[:, None] * K + lane[None, :]
        for head in range(first_v, first_v + HEADS):
            channel_v = 2 * H * K + head * V + index_v
            rate = tl.load(A_log + head).to(tl.float32)
            bias = tl.load(dt_bias + head).to(tl.float32)
            b_w = tl.load(norm_weight + index_v, mask=mask_v, other=0.0)
            past_q = last_inputs(p_old + channel_q, mask_k & known, C, W)
            past_k = last_inputs(p_old + channel_k, mask_k & known, C, W)
            past_v = last_inputs(p_old + channel_v, mask_v & known, C, W)
            p_s = state + (initial * HV + head) * V * K + tile_s
            states = load_state(p_s, mask_v & known, K, LANES, HALVINGS)
            for i in range(num_replayed + num_new):
                is_new = i >= num_replayed
                place = i - num_replayed
                p_record = p_replayed + i * R
                p_i = tl.where(is_new, p_x + place * stride_x, p_record)
                p_b = tl.where(is_new, b + (token + place) * stride_b, p_record + C) + head
                p_a = tl.where(is_new, a + (token + place) * stride_a, p_record + C + HV) + head
                x_q = tl.load(p_i + channel_q, mask=mask_k, other=0.0)
                x_k = tl.load(p_i + channel_k, mask=mask_k, other=0.0)
                x_v = tl.load(p_i + channel_v, mask=mask_v, other=0.0)
                x_b = tl.load(p_b).to(tl.float32)
                x_a = tl.load(p_a).to(tl.float32) + bias
                tap_k = taps(conv_weight, conv_bias, channel_k, mask_k, W)
                tap_v = taps(conv_weight, conv_bias, channel_v, mask_v, W)
                b_k = convolve(past_k, x_k, tap_k, W, SILU)
                b_v = convolve(past_v, x_v, tap_v, W, SILU)
                parts_k = cut_in_pieces(unit(b_k, 1.0), HALVINGS)
                decay, beta = _gates(x_a, x_b, rate, beta_scale)
                b_u = _correction(states, parts_k, b_v, decay, beta, HALVINGS)
                advanced = ()
                for piece in tl.static_range(P):
                    b_s = _advanced(states[piece], parts_k[piece], b_u, decay)
                    advanced = advanced + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
                states = advanced
                if i == last_certain:
                    p_s = state + (slot * HV + head) * V * K + tile_s
                    leave_state(p_s, states, mask_v & kept, K, LANES, HALVINGS)
                if is_new:
                    tap_q = taps(conv_weight, conv_bias, channel_q, mask_k, W)
                    b_q = convolve(past_q, x_q, tap_q, W, SILU)
                    b_o = read_state(states, cut_in_pieces(unit(b_q, scale), HALVINGS), HALVINGS)
                    row = (token + place) * stride_z + head * V + index_v
                    b_z = tl.load(z + row, mask=mask_v, other=0.0)
                    dtype: tl.constexpr = out.dtype.element_ty
                    b_o = _gated_norm(b_o, b_w, b_z, norm_eps, V, dtype, SIGMOID_GATE)
                    p_out = out + ((token + place) * HV + head) * V + index_v
                    tl.store(p_out, b_o.to(dtype), mask=mask_v)
                past_q = past_q[1:] + (x_q,)  # noqa: RUF005
                past_k = past_k[1:] + (x_k,)  # noqa: RUF005
                past_v = past_v[1:] + (x_v,)  # noqa: RUF005
            if kept:
                leave_channels(
                    p_old + channel_v,
                    p_replayed + channel_v,
                    p_x + channel_v,
                    p_left + channel_v,
                    p_drafts + channel_v,
                    known,
                    num_replayed,
                    num_new,
                    stride_x,
                    mask_v,
                    C,
                    R,
                    W,
                )
                for i in range(1, num_new):
                    p_gates = p_drafts + (i - 1) * R + C + head
                    tl.store(p_gates, tl.load(b + (token + i) * stride_b + head))
                    tl.store(p_gates + HV, tl.load(a + (token + i) * stride_a + head))
        if kept:
            for part in tl.static_range(2):
                channel = part * H * K + channel_q
                leave_channels(
                    p_old + channel,
                    p_replayed + channel,
                    p_x + channel,
                    p_left + channel,
                    p_drafts + channel,
                    known,
                    num_replayed,
                    num_new,
                    stride_x,
                    mask_k,
                    C,
                    R,
                    W,
                )

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    for head in range(first_v, first_v + HEADS):
        zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, HV, V)
