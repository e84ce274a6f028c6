# mypy: disable-error-code="untyped-decorator"
"""The Triton form of delta rules' steps in which sequences have any number of tokens, each by the
arithmetic of a decode step: a token's bits and the states after it depend on nothing but the tokens
before it.

Three launches, as in ``delta_step.py``: here every token is prepared by itself, and states walk
from one to the next while inputs of the two after it are on their way. How many rows of a state a
program has says nothing about how a row is summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.delta_step import StepTensors
from torch_hybrid.ops.triton.conv_step import convolve, inputs_before, leave_inputs, taps
from torch_hybrid.ops.triton.delta_step import (
    PIECE,
    PREPARED_CHANNELS,
    STATE_WARPS,
    Rule,
    advance_states,
    decay_of,
    inputs_of_head,
    launch_norm,
    leave_states,
    pieces_of_row,
    read_states,
    rows_of_warp,
    unit,
)
from torch_hybrid.ops.triton.devices import PROCESSORS, launches_early
from torch_hybrid.ops.triton.ragged import sequence_of_token

# Rows of a state that a warp has where few sequences leave most processors idle: a token then
# takes as long as what it sums, and there is less of that.
_FEW_ROWS = 8
_SCHEDULERS = 4  # of a processor, each of which a warp can keep busy


def launch_extend(*tensors: Tensor | None, activation: str, rule: Rule) -> Tensor:
    """Run a step on the tensors of its op, whose sequences have any number of tokens."""
    x = StepTensors(*tensors)  # type: ignore[arg-type]
    num_seqs, num_tokens = x.state_indices.shape[0], x.qkv.shape[0]
    _, num_v_heads, head_dim_v, head_dim_k = x.state.shape
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    if num_seqs == 0 or num_tokens == 0:
        return out.zero_()
    num_k_heads = x.widths[0] // head_dim_k
    sizes = {"H": num_k_heads, "HV": num_v_heads, "K": head_dim_k, "V": head_dim_v}
    sizes |= {"BY_CHANNEL": rule.by_channel, "W": x.conv_weight.shape[1]}
    early = launches_early(x.qkv.device)
    block = triton.next_power_of_2(max(head_dim_k, head_dim_v))
    num_heads = max(1, PREPARED_CHANNELS // block)
    num_blocks = triton.cdiv(2 * num_k_heads + num_v_heads, num_heads)
    num_blocks += 1 + triton.cdiv(x.a.shape[1], num_heads * block)
    width = x.qkv.shape[1] + x.b.shape[1] + x.a.shape[1]
    prepared = x.state.new_empty(num_tokens, width)
    _prepare_token_kernel[(num_blocks * num_tokens,)](
        x.qkv,
        x.b,
        x.a,
        x.conv_weight,
        x.conv_bias,
        x.A_log,
        x.dt_bias,
        x.conv_state,
        x.cu_seqlens,
        x.initial_indices,
        prepared,
        rule.scale,
        rule.beta_scale,
        rule.lower_bound,
        num_seqs,
        x.qkv.stride(0),
        x.b.stride(0),
        x.a.stride(0),
        **sizes,
        HEADS=num_heads,
        BLOCK=block,
        BLOCK_HEADS=triton.next_power_of_2(num_v_heads),
        SILU=activation == "silu",
        EARLY=early,
        num_warps=1,
        enable_fp_fusion=False,
    )
    num_rows, num_warps = _rows_and_warps(num_seqs * num_v_heads, head_dim_v, head_dim_k)
    walks = triton.cdiv(head_dim_v, num_rows) * num_v_heads
    leaves = triton.cdiv(x.qkv.shape[1], PREPARED_CHANNELS)
    _walk_tokens_kernel[((walks + leaves) * num_seqs,)](
        prepared,
        x.qkv,
        x.conv_state,
        x.state,
        x.cu_seqlens,
        x.initial_indices,
        x.state_indices,
        out,
        x.qkv.stride(0),
        **sizes,
        PIECES=triton.cdiv(head_dim_k, PIECE),
        LANES=PIECE,
        ROWS=num_rows,
        CHANNELS=PREPARED_CHANNELS,
        EARLY=early,
        num_warps=num_warps,
        enable_fp_fusion=False,
        launch_pdl=early,
    )
    launch_norm(out, x, rule, early=early)
    return out


def _rows_and_warps(num_states: int, head_dim_v: int, head_dim_k: int) -> tuple[int, int]:
    """Rows of a state that a program walks, and its warps: as in decode steps where that is work
    for all warps that run at once, and else few."""
    of_warp = rows_of_warp(head_dim_k)
    block_v = triton.next_power_of_2(head_dim_v)
    most = min(block_v, STATE_WARPS * of_warp)
    if num_states * triton.cdiv(head_dim_v, most) >= PROCESSORS * _SCHEDULERS:
        return most, max(1, most // of_warp)
    return min(block_v, _FEW_ROWS, of_warp), 1


@triton.jit(do_not_specialize=["num_seqs"])
def _prepare_token_kernel(
    qkv: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor | None,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    conv_state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    prepared: tl.tensor,
    scale: tl.tensor,
    beta_scale: tl.tensor,
    lower_bound: tl.tensor | None,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_b: tl.tensor,
    stride_a: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program: HEADS heads of q, k and v of a token, its step sizes, or some of its decays."""
    if EARLY:
        gdc_launch_dependents()
    C: tl.constexpr = 2 * H * K + HV * V
    DECAYS: tl.constexpr = HV * K if BY_CHANNEL else HV
    R: tl.constexpr = C + HV + DECAYS
    OF_HEADS: tl.constexpr = (2 * H + HV + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = OF_HEADS + 1 + (DECAYS + HEADS * BLOCK - 1) // (HEADS * BLOCK)
    block = tl.program_id(0) % BLOCKS
    token = tl.program_id(0) // BLOCKS
    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    if seq < num_seqs:
        place = token - tl.load(cu_seqlens + seq)
        row = token.to(tl.int64)
        p_prepared = prepared + row * R
        if block < OF_HEADS:
            head = block * HEADS + tl.arange(0, HEADS)
            index = tl.arange(0, BLOCK)
            is_key = head < 2 * H
            first = tl.where(is_key, head * K, 2 * H * K + (head - 2 * H) * V)
            channel = first[:, None] + index[None, :]
            mask = index[None, :] < tl.where(is_key, K, V)[:, None]
            mask &= (head < 2 * H + HV)[:, None]
            initial = tl.load(initial_indices + seq).to(tl.int64)
            p_x = qkv + row * stride_x + channel
            past = inputs_before(
                p_x,
                stride_x,
                conv_state + initial * (W - 1) * C + channel,
                place,
                initial != 0,
                mask,
                C,
                W,
            )
            tap = taps(conv_weight, conv_bias, channel, mask, W)
            b_y = convolve(past, tl.load(p_x, mask=mask, other=0.0), tap, W, SILU)
            factor = tl.where(head < H, scale, 1.0)
            b_y = tl.where(is_key[:, None], unit(b_y, factor), b_y)
            tl.store(p_prepared + channel, b_y, mask=mask)
        elif block == OF_HEADS:
            index_b = tl.arange(0, BLOCK_HEADS)
            mask_b = index_b < HV
            b_b = tl.load(b + row * stride_b + index_b, mask=mask_b, other=0.0).to(tl.float32)
            tl.store(p_prepared + C + index_b, beta_scale / (1.0 + tl.exp(-b_b)), mask=mask_b)
        else:
            index_a = (block - OF_HEADS - 1) * HEADS * BLOCK + tl.arange(0, HEADS * BLOCK)
            mask_a = index_a < DECAYS
            b_a = tl.load(a + row * stride_a + index_a, mask=mask_a, other=0.0).to(tl.float32)
            b_a += tl.load(dt_bias + index_a, mask=mask_a, other=0.0).to(tl.float32)
            b_A = tl.load(A_log + index_a // (DECAYS // HV), mask=mask_a, other=0.0)
            b_decay = decay_of(b_a, b_A.to(tl.float32), lower_bound)
            tl.store(p_prepared + C + HV + index_a, b_decay, mask=mask_a)


@triton.jit
def _walk_tokens_kernel(
    prepared: tl.tensor,
    qkv: tl.tensor,
    conv_state: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    stride_x: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    W: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program: ROWS rows of the state of one head of one sequence through all of its tokens; or
    what its convolution leaves of CHANNELS channels, which every token has read by then."""
    if EARLY:
        gdc_launch_dependents()
    C: tl.constexpr = 2 * H * K + HV * V
    R: tl.constexpr = C + HV + (HV * K if BY_CHANNEL else HV)
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    PARTS: tl.constexpr = BLOCKS * HV + (C + CHANNELS - 1) // CHANNELS
    seq = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    begin = begin.to(tl.int64)
    if num_new > 0:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        if part < BLOCKS * HV:
            head = part // BLOCKS
            index_v = part % BLOCKS * ROWS + tl.arange(0, ROWS)
            mask = index_v < V
            lane = tl.arange(0, LANES)
            # Of constants and the thread alone, so that all its rows lie at constant distances.
            tile = index_v[:, None] * K + lane[None, :]
            p_state = state + (initial * HV + head) * V * K + tile
            states = ()
            for piece in tl.static_range(PIECES):
                inside = mask[:, None] & (piece * LANES + lane < K)[None, :]
                b_s = tl.load(p_state + piece * LANES, mask=inside & (initial != 0), other=0.0)
                states = states + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
            p_out = out + (begin * HV + head) * V + index_v
            p_rows = prepared + begin * R
            from_q = head // (HV // H) * K
            p_next = p_rows + tl.minimum(num_new - 1, 1) * R

            if EARLY:
                gdc_wait()
            k, b_v, beta, decays = inputs_of_head(
                p_rows, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES
            )
            q = pieces_of_row(p_rows + from_q, K, LANES, PIECES)
            next_k, next_v, next_beta, next_decays = inputs_of_head(
                p_next, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES
            )
            next_q = pieces_of_row(p_next + from_q, K, LANES, PIECES)
            for i in range(num_new):
                p_last = p_rows + tl.minimum(num_new - 1, i + 2).to(tl.int64) * R
                last_k, last_v, last_beta, last_decays = inputs_of_head(
                    p_last, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES
                )
                last_q = pieces_of_row(p_last + from_q, K, LANES, PIECES)
                states = advance_states(states, k, b_v, beta, decays, PIECES)
                b_o = read_states(states, q, PIECES)
                tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask)
                p_out += HV * V
                k, b_v, beta, decays, q = next_k, next_v, next_beta, next_decays, next_q
                next_k, next_v, next_beta = last_k, last_v, last_beta
                next_decays, next_q = last_decays, last_q
            p_left = state + (slot * HV + head) * V * K + tile
            leave_states(p_left, states, mask & (slot != 0), K, LANES, PIECES, "")
        else:
            channel = (part - BLOCKS * HV) * CHANNELS + tl.arange(0, CHANNELS)
            mask_c = channel < C
            p_old = conv_state + initial * (W - 1) * C + channel
            if EARLY:
                gdc_wait()
            rows = inputs_before(
                qkv + (begin + num_new) * stride_x + channel,
                stride_x,
                p_old,
                num_new,
                initial != 0,
                mask_c,
                C,
                W,
            )
            tl.debug_barrier()  # all threads of this program have read what is left anew here
            p_inputs = conv_state + slot * (W - 1) * C + channel
            leave_inputs(p_inputs, rows, mask_c & (slot != 0), C, W)
    elif EARLY:
        gdc_wait()
