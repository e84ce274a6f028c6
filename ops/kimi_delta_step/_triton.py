# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of both steps: one launch, a program for each head of a sequence."""

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


def kimi_delta_step(*tensors: Tensor | None, activation: str, **options: Any) -> Tensor:
    """Launcher of ``torch_hybrid::kimi_delta_step``."""
    numbers = _numbers(**options)
    return launch_step(_step_kernel, *tensors, numbers=numbers, activation=activation)


def kimi_delta_verify(*tensors: Tensor | None, activation: str, **options: Any) -> Tensor:
    """Launcher of ``torch_hybrid::kimi_delta_verify``."""
    numbers = _numbers(**options)
    return launch_verify(_verify_kernel, *tensors, numbers=numbers, activation=activation)


def _numbers(
    scale: float, gate_lower_bound: float | None, norm_eps: float
) -> tuple[float | None, ...]:
    """The op's options as the kernels take them."""
    return scale, gate_lower_bound, norm_eps


@triton.jit
def _decay(x: tl.tensor, rate: tl.tensor, lower_bound: tl.tensor | None) -> tl.tensor:
    """Decays of channels, of what stands before their activation and the head's exp(A_log)."""
    g = -rate * softplus(x) if lower_bound is None else lower_bound / (1.0 + exp(-rate * x))
    return exp(g)


@triton.jit
def _advance(
    states: tl.tuple,
    parts_k: tl.tuple,
    b_v: tl.tensor,
    x_a: tl.tensor,
    x_b: tl.tensor,
    rate: tl.tensor,
    lower_bound: tl.tensor | None,
    HALVINGS: tl.constexpr,
) -> tl.tuple:
    """The state of a head after one token, of which ``x_a`` and ``x_b`` are gates before their
    activations."""
    parts_d = cut_in_pieces(_decay(x_a, exp(rate), lower_bound), HALVINGS)
    decayed = ()
    for piece in tl.static_range(1 << HALVINGS):
        b_s = states[piece] * parts_d[piece][None, :]
        decayed = decayed + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
    beta = 1.0 / (1.0 + tl.exp(-x_b))
    b_u = beta * (b_v - read_state(decayed, parts_k, HALVINGS))
    advanced = ()
    for piece in tl.static_range(1 << HALVINGS):
        b_s = tl.fma(b_u[:, None], parts_k[piece][None, :], decayed[piece])
        advanced = advanced + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
    return advanced


@triton.jit
def _gated_norm(
    b_o: tl.tensor,
    b_w: tl.tensor,
    b_z: tl.tensor,
    norm_eps: tl.tensor,
    V: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """o, rounded, over its root mean square, weighted and gated."""
    b_o = b_o.to(dtype).to(tl.float32)
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / V + norm_eps) * b_w.to(tl.float32)
    return b_o / (1.0 + tl.exp(-b_z.to(tl.float32)))


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
    lower_bound: tl.tensor | None,
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
) -> None:
    """One program: a head of one sequence (of keys and of values, which are as many).

    It alone reads and writes its channels of the convolution's state, which therefore may move in
    place.
    """
    C: tl.constexpr = H * (2 * K + V)
    P: tl.constexpr = 1 << HALVINGS
    LANES: tl.constexpr = BLOCK_K // P
    seq = tl.program_id(0) // H
    head = tl.program_id(0) % H
    # The state comes in P pieces of LANES columns: element e of q, k and the decay is of piece
    # e % P.
    element = tl.arange(0, BLOCK_K)
    index_k = element % P * LANES + element // P
    lane = tl.arange(0, LANES)
    index_v = tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    channel_q = head * K + index_k
    channel_k = H * K + channel_q
    channel_v = 2 * H * K + head * V + index_v

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
        # Of constants and the thread alone, so that all its rows lie at constant distances.
        tile_s = index_v[:, None] * K + lane[None, :]
        # What is small is asked for first: it does not wait for the state's bytes then.
        x_q = tl.load(p_x + channel_q, mask=mask_k, other=0.0)
        x_k = tl.load(p_x + channel_k, mask=mask_k, other=0.0)
        x_v = tl.load(p_x + channel_v, mask=mask_v, other=0.0)
        x_a = tl.load(a + token * stride_a + channel_q, mask=mask_k, other=0.0).to(tl.float32)
        x_a += tl.load(dt_bias + channel_q, mask=mask_k, other=0.0).to(tl.float32)
        rate = tl.load(A_log + head).to(tl.float32)
        x_b = tl.load(b + token * stride_b + head).to(tl.float32)
        past_q = last_inputs(p_old + channel_q, mask_k & known, C, W)
        past_k = last_inputs(p_old + channel_k, mask_k & known, C, W)
        past_v = last_inputs(p_old + channel_v, mask_v & known, C, W)
        tap_q = taps(conv_weight, conv_bias, channel_q, mask_k, W)
        tap_k = taps(conv_weight, conv_bias, channel_k, mask_k, W)
        tap_v = taps(conv_weight, conv_bias, channel_v, mask_v, W)
        b_z = tl.load(z + token * stride_z + head * V + index_v, mask=mask_v, other=0.0)
        b_w = tl.load(norm_weight + index_v, mask=mask_v, other=0.0)
        p_s = state + (initial * HV + head) * V * K + tile_s
        states = load_state(p_s, mask_v & known, K, LANES, HALVINGS)

        b_q = convolve(past_q, x_q, tap_q, W, SILU)
        b_k = convolve(past_k, x_k, tap_k, W, SILU)
        b_v = convolve(past_v, x_v, tap_v, W, SILU)
        parts_q = cut_in_pieces(unit(b_q, scale), HALVINGS)
        parts_k = cut_in_pieces(unit(b_k, 1.0), HALVINGS)
        states = _advance(states, parts_k, b_v, x_a, x_b, rate, lower_bound, HALVINGS)
        p_left = state + (slot * HV + head) * V * K + tile_s
        leave_state(p_left, states, mask_v & kept, K, LANES, HALVINGS)
        b_o = read_state(states, parts_q, HALVINGS)
        b_o = _gated_norm(b_o, b_w, b_z, norm_eps, V, out.dtype.element_ty)
        p_out = out + (token * HV + head) * V + index_v
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_v)
        tl.debug_barrier()  # all threads of this program have read what is left anew here
        p_new = conv_state + slot * (W - 1) * C
        leave_inputs(p_new + channel_q, past_q[1:] + (x_q,), mask_k & kept, C, W)  # noqa: RUF005
        leave_inputs(p_new + channel_k, past_k[1:] + (x_k,), mask_k & kept, C, W)  # noqa: RUF005
        leave_inputs(p_new + channel_v, past_v[1:] + (x_v,), mask_v & kept, C, W)  # noqa: RUF005

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
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
    lower_bound: tl.tensor | None,
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
) -> None:
    """One program: a head of one sequence (of keys and of values, which are as many).

    Its state is loaded once, goes through the accepted records and the new tokens in registers, and
    is stored after the first of these. What is left of inputs is stored last: this program alone
    reads and writes its channels, and its columns of b and a in records.
    """
    C: tl.constexpr = H * (2 * K + V)
    R: tl.constexpr = C + H * (1 + K)
    P: tl.constexpr = 1 << HALVINGS
    LANES: tl.constexpr = BLOCK_K // P
    seq = tl.program_id(0) // H
    head = tl.program_id(0) % H
    element = tl.arange(0, BLOCK_K)
    index_k = element % P * LANES + element // P
    lane = tl.arange(0, LANES)
    index_v = tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    channel_q = head * K + index_k
    channel_k = H * K + channel_q
    channel_v = 2 * H * K + head * V + index_v

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
        tile_s = index_v[:, None] * K + lane[None, :]
        rate = tl.load(A_log + head).to(tl.float32)
        bias = tl.load(dt_bias + channel_q, mask=mask_k, other=0.0).to(tl.float32)
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
            p_a = tl.where(is_new, a + (token + place) * stride_a, p_record + C + H)
            x_q = tl.load(p_i + channel_q, mask=mask_k, other=0.0)
            x_k = tl.load(p_i + channel_k, mask=mask_k, other=0.0)
            x_v = tl.load(p_i + channel_v, mask=mask_v, other=0.0)
            x_b = tl.load(p_b).to(tl.float32)
            x_a = tl.load(p_a + channel_q, mask=mask_k, other=0.0).to(tl.float32) + bias
            tap_k = taps(conv_weight, conv_bias, channel_k, mask_k, W)
            tap_v = taps(conv_weight, conv_bias, channel_v, mask_v, W)
            b_k = convolve(past_k, x_k, tap_k, W, SILU)
            b_v = convolve(past_v, x_v, tap_v, W, SILU)
            parts_k = cut_in_pieces(unit(b_k, 1.0), HALVINGS)
            states = _advance(states, parts_k, b_v, x_a, x_b, rate, lower_bound, HALVINGS)
            if i == last_certain:
                p_s = state + (slot * HV + head) * V * K + tile_s
                leave_state(p_s, states, mask_v & kept, K, LANES, HALVINGS)
            if is_new:
                tap_q = taps(conv_weight, conv_bias, channel_q, mask_k, W)
                b_q = convolve(past_q, x_q, tap_q, W, SILU)
                b_o = read_state(states, cut_in_pieces(unit(b_q, scale), HALVINGS), HALVINGS)
                row = (token + place) * stride_z + head * V + index_v
                b_z = tl.load(z + row, mask=mask_v, other=0.0)
                b_o = _gated_norm(b_o, b_w, b_z, norm_eps, V, out.dtype.element_ty)
                p_out = out + ((token + place) * HV + head) * V + index_v
                tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_v)
            past_q = past_q[1:] + (x_q,)  # noqa: RUF005
            past_k = past_k[1:] + (x_k,)  # noqa: RUF005
            past_v = past_v[1:] + (x_v,)  # noqa: RUF005
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
                p_gates = p_drafts + (i - 1) * R + C
                tl.store(p_gates + head, tl.load(b + (token + i) * stride_b + head))
                x_a = tl.load(a + (token + i) * stride_a + channel_q, mask=mask_k)
                tl.store(p_gates + H + channel_q, x_a, mask=mask_k)

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, HV, V)
