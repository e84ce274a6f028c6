"""Delta rules' steps in Triton, drafts included: prepare the inputs, walk the states, norm the
outputs.

Three launches, each of which begins while the one before it ends, where a GPU can (PDL); see
``README.md``. A decode step verifies no drafts: both run the same kernels, so a state has the same
bits whichever advanced it. Only what is written as ``fma`` is fused, since a compiler's own choice
depends on the code around it.

A token's inputs, and a record, are a row [q | k | v | b | a]. The first launch hands them to the
second prepared: q and k convolved and normed, v convolved, the step size, the decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.delta_rule.op_step import DeltaStep
from torch_hybrid.ops.triton.conv_step import convolve, last_inputs, leave_inputs, taps
from torch_hybrid.ops.triton.decays import exp, softplus
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.state_pieces import (
    PIECE,
    leave_states,
    load_states,
    pieces_of_row,
    read_states,
)

# State elements that one warp keeps in registers, 64 a thread: what they meet along K is read once
# for all of them. So many warps of a program read it from L1.
_STATE_TILE = 2048
STATE_WARPS = 2
# Channels that a program of one warp prepares, of whole heads of q, k and v.
PREPARED_CHANNELS = 256
# Heads that a program norms, a warp each.
_NORMED_HEADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Arithmetic of one delta rule.

    Attributes:
        norm: a jit function of outputs [heads, V], the norm's weight [V], gates, its eps, V and the
            op's dtype; it returns the op's outputs, in float32.
        norm_eps: eps of the op's norm.
        beta_scale: factor of step sizes.
        lower_bound: of log decays, or None.
        by_channel: whether each channel of K has its own decay.
    """

    norm: Any
    norm_eps: float
    beta_scale: float = 1.0
    lower_bound: float | None = None
    by_channel: bool = False


def launch_step(x: DeltaStep, rule: Rule) -> Tensor:
    """Run a step of one token of each sequence, and of its drafts."""
    num_drafts = 0 if x.records is None else x.records.shape[1]
    num_seqs = x.state_indices.shape[0]
    _, num_v_heads, head_dim_v, head_dim_k = x.state.shape
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out.zero_()
    num_k_heads = x.widths[0] // head_dim_k
    sizes = {"H": num_k_heads, "HV": num_v_heads, "K": head_dim_k, "V": head_dim_v}
    sizes |= {"DRAFTS": num_drafts, "BY_CHANNEL": rule.by_channel}
    prepared = launch_prepare(x, rule, sizes)
    of_warp = rows_of_warp(head_dim_k)
    num_rows = min(triton.next_power_of_2(head_dim_v), STATE_WARPS * of_warp)
    num_blocks = triton.cdiv(head_dim_v, num_rows)
    bind(_walk_kernel, x)[(num_blocks * num_v_heads * num_seqs,)](
        prepared=prepared,
        out=out,
        **sizes,
        PIECES=triton.cdiv(head_dim_k, PIECE),
        LANES=PIECE,
        ROWS=num_rows,
        num_warps=max(1, num_rows // of_warp),
        enable_fp_fusion=False,
    )
    launch_norm(out, x, rule)
    return out


def launch_prepare(x: DeltaStep, rule: Rule, sizes: Mapping[str, int]) -> Tensor:
    """Prepare the inputs of each sequence's tokens, replayed ones included -> [N, M, R]."""
    num_seqs, num_drafts = x.state_indices.shape[0], sizes["DRAFTS"]
    width = x.qkv.shape[1] + x.b.shape[1] + x.a.shape[1]
    prepared = x.state.new_empty(num_seqs, 1 + 2 * num_drafts, width)
    block = triton.next_power_of_2(max(sizes["K"], sizes["V"]))
    num_heads = max(1, PREPARED_CHANNELS // block)
    num_blocks = triton.cdiv(2 * sizes["H"] + sizes["HV"], num_heads)
    num_blocks += 1 + triton.cdiv(x.a.shape[1], num_heads * block)
    bind(_prepare_kernel, x, rule)[(num_blocks * num_seqs,)](
        prepared=prepared,
        **sizes,
        HEADS=num_heads,
        BLOCK=block,
        BLOCK_HEADS=triton.next_power_of_2(sizes["HV"]),
        SILU=x.activation == "silu",
        num_warps=1,
        enable_fp_fusion=False,
    )
    return prepared


def launch_norm(out: Tensor, x: DeltaStep, rule: Rule) -> None:
    """Normalise and gate the outputs in place."""
    num_tokens, (num_v_heads, head_dim_v) = out.shape[0], x.state.shape[1:3]
    bind(_norm_kernel, x, rule)[(triton.cdiv(num_tokens * num_v_heads, _NORMED_HEADS),)](
        out=out,
        weight=x.norm_weight,
        eps=rule.norm_eps,
        num_tokens=num_tokens,
        BLOCK_V=triton.next_power_of_2(head_dim_v),
        HEADS=_NORMED_HEADS,
        num_warps=_NORMED_HEADS,
        enable_fp_fusion=False,
    )


def rows_of_warp(head_dim_k: int) -> int:
    """Count the rows of a state that one warp keeps in registers."""
    width: int = PIECE * triton.next_power_of_2(triton.cdiv(head_dim_k, PIECE))
    return _STATE_TILE // width


@triton.jit
def unit(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Scale rows to ``scale x / |x|``."""
    return x * (tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * scale)[:, None]


@triton.jit
def decay_of(x: tl.tensor, A_log: tl.tensor, lower_bound: tl.tensor | None) -> tl.tensor:
    """Compute decays ``e^g``: g is ``-e^A softplus(x)``, or ``lower_bound sigmoid(e^A x)``."""
    rate = exp(A_log)
    g = -rate * softplus(x) if lower_bound is None else lower_bound / (1.0 + exp(-rate * x))
    return exp(g)


@triton.jit
def _row(
    i: tl.tensor,
    num_replayed: tl.tensor,
    p_replayed: tl.tensor,
    p_new: tl.tensor,
    stride: tl.tensor,
    R: tl.constexpr,
) -> tl.tensor:
    """Point to the i-th row of a sequence: its accepted records, then its new tokens."""
    return tl.where(i < num_replayed, p_replayed + i * R, p_new + (i - num_replayed) * stride)


@triton.jit
def _prepare_channels(
    p_new: tl.tensor,
    stride: tl.tensor,
    p_replayed: tl.tensor,
    p_drafts: tl.tensor,
    p_old: tl.tensor,
    p_left: tl.tensor,
    p_prepared: tl.tensor,
    tap: tl.tuple,
    is_key: tl.tensor,
    scale: tl.tensor,
    num_replayed: tl.tensor,
    num_new: tl.tensor,
    num_tokens: tl.tensor,
    known: tl.tensor,
    kept: tl.tensor,
    mask: tl.tensor,
    C: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Convolve heads' channels of a sequence's tokens in turn, and norm those of q and k.

    The convolution's state receives the last committed inputs, and records receive the drafts'.
    Each row is loaded while the one before it is convolved.
    """
    past = last_inputs(p_old, mask & known, C, W)
    b_x = tl.load(_row(0, num_replayed, p_replayed, p_new, stride, R), mask=mask, other=0.0)
    for i in range(num_tokens):
        p_next = _row(i + 1, num_replayed, p_replayed, p_new, stride, R)
        b_next = tl.load(p_next, mask=mask & (i + 1 < num_tokens), other=0.0)
        b_y = convolve(past, b_x, tap, W, SILU)
        b_y = tl.where(is_key[:, None], unit(b_y, scale), b_y)
        tl.store(p_prepared + i * R, b_y, mask=mask)
        past = past[1:] + (b_x,)  # noqa: RUF005
        draft = i - num_replayed - 1
        if i == num_replayed + tl.minimum(num_new, 1) - 1:
            tl.debug_barrier()  # all threads of this program have read what is left anew
            leave_inputs(p_left, past, mask & kept, C, W)
        tl.store(p_drafts + draft * R, b_x, mask=mask & kept & (draft >= 0))
        b_x = b_next


@triton.jit
def _prepare_gates(
    p_new: tl.tensor,
    stride: tl.tensor,
    p_replayed: tl.tensor,
    p_drafts: tl.tensor,
    p_prepared: tl.tensor,
    b_bias: tl.tensor,
    A_log: tl.tensor | None,
    limit: tl.tensor | None,
    num_replayed: tl.tensor,
    num_new: tl.tensor,
    num_tokens: tl.tensor,
    kept: tl.tensor,
    mask: tl.tensor,
    R: tl.constexpr,
) -> None:
    """Prepare the decays of a sequence's tokens, or step sizes where there is no ``A_log``.

    Records receive the drafts' inputs. ``limit`` is the lower bound of log decays, or the scale of
    step sizes.
    """
    b_x = tl.load(_row(0, num_replayed, p_replayed, p_new, stride, R), mask=mask, other=0.0)
    for i in range(num_tokens):
        p_next = _row(i + 1, num_replayed, p_replayed, p_new, stride, R)
        b_next = tl.load(p_next, mask=mask & (i + 1 < num_tokens), other=0.0)
        if A_log is None:
            b_y = limit / (1.0 + tl.exp(-b_x.to(tl.float32)))
        else:
            b_y = decay_of(b_x.to(tl.float32) + b_bias, A_log, limit)
        tl.store(p_prepared + i * R, b_y, mask=mask)
        draft = i - num_replayed - 1
        if draft == 0:
            tl.debug_barrier()  # all threads of this program have read what is left anew
        tl.store(p_drafts + draft * R, b_x, mask=mask & kept & (draft >= 0))
        b_x = b_next


@triton.jit
def _prepare_kernel(
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
    state_indices: tl.tensor,
    accepted: tl.tensor | None,
    records: tl.tensor | None,
    prepared: tl.tensor,
    scale: tl.tensor,
    beta_scale: tl.tensor,
    lower_bound: tl.tensor | None,
    stride_qkv: tl.tensor,
    stride_b: tl.tensor,
    stride_a: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    DRAFTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Prepare HEADS heads of q, k and v, all step sizes, or some decays, of a sequence's tokens.

    Grid: (blocks of heads, one for step sizes, blocks of decays) times sequences. Tile: one warp
    with HEADS rows of BLOCK channels, token after token. Memory: prepared rows go to the next
    launch in float32. No other program reads or writes its columns of the convolution's state and
    of records, so they move in place.
    """
    follow(EARLY)
    if EARLY:
        gdc_launch_dependents()
    C: tl.constexpr = 2 * H * K + HV * V
    DECAYS: tl.constexpr = HV * K if BY_CHANNEL else HV
    R: tl.constexpr = C + HV + DECAYS
    OF_HEADS: tl.constexpr = (2 * H + HV + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = OF_HEADS + 1 + (DECAYS + HEADS * BLOCK - 1) // (HEADS * BLOCK)
    seq = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    initial = tl.load(initial_indices + seq).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    token = begin.to(tl.int64)
    known = initial != 0
    kept = slot != 0
    p_x = qkv + token * stride_qkv
    p_b = b + token * stride_b
    p_a = a + token * stride_a
    p_old = conv_state + initial * (W - 1) * C
    p_left = conv_state + slot * (W - 1) * C
    p_prepared = prepared + seq.to(tl.int64) * (1 + 2 * DRAFTS) * R
    if DRAFTS > 0:
        num_replayed = tl.load(accepted + seq)
        p_replayed = records + initial * DRAFTS * R
        p_drafts = records + slot * DRAFTS * R
    else:  # nothing is read or written there
        num_replayed = tl.zeros_like(begin)
        p_replayed = p_x
        p_drafts = p_x
    if num_new + num_replayed > 0:
        # In decode steps a sequence has one token or none.
        num_tokens = num_new + num_replayed if DRAFTS > 0 else 1
        if block < OF_HEADS:
            head = block * HEADS + tl.arange(0, HEADS)
            index = tl.arange(0, BLOCK)
            is_key = head < 2 * H
            first = tl.where(is_key, head * K, 2 * H * K + (head - 2 * H) * V)
            channel = first[:, None] + index[None, :]
            mask = index[None, :] < tl.where(is_key, K, V)[:, None]
            mask &= (head < 2 * H + HV)[:, None]
            _prepare_channels(
                p_x + channel,
                stride_qkv,
                p_replayed + channel,
                p_drafts + channel,
                p_old + channel,
                p_left + channel,
                p_prepared + channel,
                taps(conv_weight, conv_bias, channel, mask, W),
                is_key,
                tl.where(head < H, scale, 1.0),
                num_replayed,
                num_new,
                num_tokens,
                known,
                kept,
                mask,
                C,
                R,
                W,
                SILU,
            )
        elif block == OF_HEADS:
            index_b = tl.arange(0, BLOCK_HEADS)
            mask_b = index_b < HV
            _prepare_gates(
                p_b + index_b,
                stride_b,
                p_replayed + C + index_b,
                p_drafts + C + index_b,
                p_prepared + C + index_b,
                0.0,
                None,
                beta_scale,
                num_replayed,
                num_new,
                num_tokens,
                kept,
                mask_b,
                R,
            )
        else:
            index_a = (block - OF_HEADS - 1) * HEADS * BLOCK + tl.arange(0, HEADS * BLOCK)
            mask_a = index_a < DECAYS
            column = C + HV + index_a
            _prepare_gates(
                p_a + index_a,
                stride_a,
                p_replayed + column,
                p_drafts + column,
                p_prepared + column,
                tl.load(dt_bias + index_a, mask=mask_a, other=0.0).to(tl.float32),
                tl.load(A_log + index_a // (DECAYS // HV), mask=mask_a, other=0.0).to(tl.float32),
                lower_bound,
                num_replayed,
                num_new,
                num_tokens,
                kept,
                mask_a,
                R,
            )


@triton.jit
def inputs_of_head(
    p_row: tl.tensor,
    head: tl.tensor,
    index_v: tl.tensor,
    mask: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tuple:
    """Load one head's prepared k, rows of v, step size and decays of one token."""
    C: tl.constexpr = 2 * H * K + HV * V
    parts_k = pieces_of_row(p_row + (H + head // (HV // H)) * K, K, LANES, PIECES)
    b_v = tl.load(p_row + 2 * H * K + head * V + index_v, mask=mask, other=0.0)
    beta = tl.load(p_row + C + head)
    if BY_CHANNEL:
        decays = pieces_of_row(p_row + C + HV + head * K, K, LANES, PIECES)
    else:
        decays = (tl.load(p_row + C + HV + head),)
    return parts_k, b_v, beta, decays


@triton.jit
def advance_states(
    states: tl.tuple,
    parts_k: tl.tuple,
    b_v: tl.tensor,
    beta: tl.tensor,
    decays: tl.tuple,
    PIECES: tl.constexpr,
) -> tl.tuple:
    """Advance rows of a head's state by one token."""
    decayed = ()
    for piece in tl.static_range(PIECES):
        b_s = states[piece] * decays[piece % len(decays)]
        decayed = decayed + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
    b_u = beta * (b_v - read_states(decayed, parts_k, PIECES))
    advanced = ()
    for piece in tl.static_range(PIECES):
        b_s = tl.fma(b_u[:, None], parts_k[piece], decayed[piece])
        advanced = advanced + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
    return advanced


@triton.jit
def _walk_kernel(
    prepared: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    accepted: tl.tensor | None,
    out: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    DRAFTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Walk ROWS rows of one head's state of one sequence through its tokens.

    Grid: V / ROWS times heads times sequences. Registers: the rows, in PIECES pieces of LANES
    columns, 64 numbers a thread. Pipeline: the state is loaded before the launch before has ended,
    and stored after the first new token.

    Every program waits for the launch before, also one without a token: the launch after this one
    then comes after both.
    """
    if EARLY:
        gdc_launch_dependents()
    R: tl.constexpr = 2 * H * K + HV * V + HV + (HV * K if BY_CHANNEL else HV)
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    # What is prepared of several tokens stays in L2, and states, which are read once, do not.
    PASSING: tl.constexpr = "evict_first" if DRAFTS > 0 else ""
    pid = tl.program_id(0)
    seq = pid // (BLOCKS * HV)
    head = pid // BLOCKS % HV
    index_v = pid % BLOCKS * ROWS + tl.arange(0, ROWS)
    mask = index_v < V
    lane = tl.arange(0, LANES)
    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    num_replayed = tl.load(accepted + seq) if DRAFTS > 0 else tl.zeros_like(begin)
    if num_new + num_replayed > 0:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        # Of constants and the thread alone, so that all its rows lie at constant distances.
        tile = index_v[:, None] * K + lane[None, :]
        p_state = state + (initial * HV + head) * V * K + tile
        p_left = state + (slot * HV + head) * V * K + tile
        states = load_states(p_state, mask & (initial != 0), K, LANES, PIECES, PASSING)
        p_prepared = prepared + seq.to(tl.int64) * (1 + 2 * DRAFTS) * R
        p_out = out + (begin.to(tl.int64) * HV + head) * V + index_v

        if EARLY:
            gdc_wait()
        if DRAFTS > 0:
            for i in range(num_replayed):
                parts_k, b_v, beta, decays = inputs_of_head(
                    p_prepared + i * R, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES
                )
                states = advance_states(states, parts_k, b_v, beta, decays, PIECES)
            if num_new == 0:
                leave_states(p_left, states, mask & (slot != 0), K, LANES, PIECES, PASSING)
        # In decode steps a sequence has one token or none.
        for i in range(num_new if DRAFTS > 0 else 1):
            p_row = p_prepared + (num_replayed + i) * R
            parts_k, b_v, beta, decays = inputs_of_head(
                p_row, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES
            )
            states = advance_states(states, parts_k, b_v, beta, decays, PIECES)
            if i == 0:
                leave_states(p_left, states, mask & (slot != 0), K, LANES, PIECES, PASSING)
            p_q = p_row + head // (HV // H) * K
            b_o = read_states(states, pieces_of_row(p_q, K, LANES, PIECES), PIECES)
            tl.store(p_out + i * HV * V, b_o.to(out.dtype.element_ty), mask=mask)

    if EARLY:
        gdc_wait()


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _norm_kernel(
    out: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    cu_seqlens: tl.tensor,
    eps: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_z: tl.tensor,
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalise and gate HEADS heads of tokens in place; padding becomes 0.

    Grid: tokens times heads / HEADS. Tile: a warp for each head's V channels.
    """
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    index = tl.arange(0, BLOCK_V)
    token = row // HV
    inside = (token < num_tokens)[:, None] & (index < V)[None, :]
    mask = inside & (token < tl.load(cu_seqlens + num_seqs))[:, None]
    p_z = z + (token * stride_z + row % HV * V)[:, None] + index[None, :]
    b_z = tl.load(p_z, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight + index, mask=index < V, other=0.0)
    follow(EARLY)
    p_out = out + (row * V)[:, None] + index[None, :]
    b_o = tl.load(p_out, mask=mask, other=0.0).to(tl.float32)
    b_o = NORM(b_o, b_w, b_z, eps, V, out.dtype.element_ty)
    tl.store(p_out, b_o.to(out.dtype.element_ty), mask=inside)
