"""Delta rules' decode steps by open chunks (``open_chunk.py``), and their closing.

A step is three launches, as in ``_triton_step.py``; the second reads states and records, and
stores a state when the chunk is full. Closing stores the states of all sequences in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.delta_rule._triton_step import (
    PIECE,
    Rule,
    inputs_of_head,
    launch_norm,
    launch_prepare,
    leave_states,
    pieces_of_row,
    read_states,
)
from torch_hybrid.ops.delta_rule.op_step import DeltaStep
from torch_hybrid.ops.delta_rule.open_chunk import OPEN_TOKENS, RING, rows_of_block
from torch_hybrid.ops.triton.conv_step import last_inputs, leave_inputs
from torch_hybrid.ops.triton.devices import launches_early
from torch_hybrid.ops.triton.launch import bind

_ROWS_OF_WARP = 32
_CHANNELS = 512  # of a convolution's state that a program of a closing moves at once
_TOKENS: tl.constexpr = tl.constexpr(OPEN_TOKENS)
_RING: tl.constexpr = tl.constexpr(RING)


def launch_open_step(x: DeltaStep, rule: Rule) -> Tensor:
    """Run a token of each sequence that has one; without any token, close all chunks."""
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    num_seqs = x.state_indices.shape[0]
    if num_seqs == 0:
        return out.zero_()
    _, num_v_heads, head_dim_v, head_dim_k = x.state.shape
    rows = rows_of_block(head_dim_v)
    sizes = {"H": x.widths[0] // head_dim_k, "HV": num_v_heads, "K": head_dim_k, "V": head_dim_v}
    sizes |= {"BY_CHANNEL": rule.by_channel}
    tile: dict[str, Any] = sizes | {"PIECES": triton.cdiv(head_dim_k, PIECE), "LANES": PIECE}
    tile |= {"ROWS": rows, "num_warps": max(1, rows // _ROWS_OF_WARP), "enable_fp_fusion": False}
    grid = (triton.cdiv(head_dim_v, rows) * num_v_heads * num_seqs,)
    early = launches_early(x.qkv.device)
    if not len(x.qkv):
        bind(_close_kernel, x)[grid](CHANNELS=_CHANNELS, **tile)
        return out
    prepared = launch_prepare(x, rule, sizes | {"DRAFTS": 0}, early=early)
    bind(_open_kernel, x)[grid](
        prepared=prepared,
        out=out,
        BLOCK_K=triton.next_power_of_2(head_dim_k),
        EARLY=early,
        launch_pdl=early,
        **tile,
    )
    launch_norm(out, x, rule, early=early)
    return out


@triton.jit
def _times(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return x * y


@triton.jit
def _records_of(
    chunk: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    block: tl.tensor,
    stride: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
) -> tl.tuple:
    """Point to a slot's keys, values, decays, totals and mark of a block of a head's rows."""
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    D: tl.constexpr = K if BY_CHANNEL else 1
    KEYS: tl.constexpr = H * _RING * K
    VALUES: tl.constexpr = KEYS + HV * BLOCKS * _RING * ROWS
    DECAYS: tl.constexpr = VALUES + HV * _RING * D
    TOTALS: tl.constexpr = DECAYS + HV * _RING * D
    own = head * BLOCKS + block
    p_slot = chunk + slot * stride
    return (
        p_slot + head // (HV // H) * _RING * K,
        p_slot + KEYS + own * _RING * ROWS,
        p_slot + VALUES + head * _RING * D,
        p_slot + DECAYS + head * _RING * D,
        p_slot + TOTALS + own,
    )


@triton.jit
def _pieces_or_one(
    p: tl.tensor,
    is_there: tl.tensor,
    K: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tuple:
    """Load decays, in pieces as states are held, or the one of a head; 1 unless ``is_there``."""
    pieces = ()
    if BY_CHANNEL:
        for piece in tl.static_range(PIECES):
            index = piece * LANES + tl.arange(0, LANES)
            b_d = tl.load(p + index, mask=is_there & (index < K), other=1.0)[None, :]
            pieces = pieces + (b_d,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        pieces = (tl.load(p, mask=is_there, other=1.0),)  # type: ignore[assignment]
    return pieces


@triton.jit
def _scaled(parts: tl.tuple, factors: tl.tuple, PIECES: tl.constexpr) -> tl.tuple:
    """Multiply pieces by pieces, or by one factor."""
    scaled = ()
    for piece in tl.static_range(PIECES):
        b_x = parts[piece] * factors[piece % len(factors)]
        scaled = scaled + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    return scaled


@triton.jit
def _load_states(
    p_state: tl.tensor,
    mask: tl.tensor,
    K: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tuple:
    """Load rows of a head's state, which pass through the caches once."""
    lane = tl.arange(0, LANES)
    states = ()
    for piece in tl.static_range(PIECES):
        inside = mask[:, None] & (piece * LANES + lane < K)[None, :]
        b_s = tl.load(
            p_state + piece * LANES, mask=inside, other=0.0, eviction_policy="evict_first"
        )
        states = states + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
    return states


@triton.jit
def _advance_by_records(
    states: tl.tuple,
    p_k: tl.tensor,
    p_u: tl.tensor,
    p_decay: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    row: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tuple:
    """Advance rows of a head's state by the tokens of its open chunk."""
    D: tl.constexpr = K if BY_CHANNEL else 1
    for i in tl.range(_TOKENS, loop_unroll_factor=2):
        is_there = i < count
        place = (first + i) % _RING
        b_u = tl.load(p_u + place * ROWS + row, mask=is_there, other=0.0)
        decays = _pieces_or_one(p_decay + place * D, is_there, K, BY_CHANNEL, LANES, PIECES)
        advanced = ()
        for piece in tl.static_range(PIECES):
            index = piece * LANES + tl.arange(0, LANES)
            b_k = tl.load(p_k + place * K + index, mask=is_there & (index < K), other=0.0)
            b_s = states[piece] * decays[piece % len(decays)]
            b_s = tl.fma(b_u[:, None], b_k[None, :], b_s)
            advanced = advanced + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
        states = advanced
    return states


@triton.jit
def _open_kernel(
    prepared: tl.tensor,
    state: tl.tensor,
    chunk: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    stride_chunk: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Read ROWS rows of one head's state and its open chunk with a token's q, and add its record.

    Grid: V / ROWS times heads times sequences. Registers: the rows, in PIECES pieces of LANES
    columns, and the chunk's keys and values. Pipeline: states and records are loaded before the
    launch before has ended. Memory: the state is stored if the chunk is full, or if it began in
    another slot. A record goes where none is read; the first program of a head stores its decays,
    and the first of a key head the key.

    Every program waits for the launch before, as in ``_walk_kernel``.
    """
    if EARLY:
        gdc_launch_dependents()
    D: tl.constexpr = K if BY_CHANNEL else 1
    C: tl.constexpr = 2 * H * K + HV * V
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    seq = pid // (BLOCKS * HV)
    head = pid // BLOCKS % HV
    block = pid % BLOCKS
    row = tl.arange(0, ROWS)
    index_v = block * ROWS + row
    mask = index_v < V
    token = tl.load(cu_seqlens + seq).to(tl.int64)
    if tl.load(cu_seqlens + seq + 1) > token:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        tile = index_v[:, None] * K + tl.arange(0, LANES)[None, :]
        p_state = state + (initial * HV + head) * V * K + tile
        states = _load_states(p_state, mask & (initial != 0), K, LANES, PIECES)
        p_k, p_u, p_decay, p_total, p_mark = _records_of(
            chunk, initial, head, block, stride_chunk, H, HV, K, V, ROWS, BY_CHANNEL
        )
        mark = tl.load(p_mark, mask=initial != 0, other=0.0).to(tl.int32)
        first = mark // (2 * _RING)
        count = mark % (2 * _RING)
        i = tl.arange(0, _TOKENS)
        at = (first + i) % _RING
        column = tl.arange(0, BLOCK_K)
        channel = column if BY_CHANNEL else tl.arange(0, 1)
        is_live = (i < count)[:, None]
        b_k = tl.load(
            p_k + at[:, None] * K + column[None, :],
            mask=is_live & (column < K)[None, :],
            other=0.0,
        )
        b_u = tl.load(p_u + at[:, None] * ROWS + row[None, :], mask=is_live, other=0.0)
        p_later = p_decay + (first + i + 1) % _RING * D
        if BY_CHANNEL:
            p_later = p_later[:, None] + channel[None, :]
            inside = (i + 1 < count)[:, None] & (channel < D)[None, :]
            later = tl.load(p_later, mask=inside, other=1.0)
            b_k *= tl.associative_scan(later, 0, _times, reverse=True)
        else:
            later = tl.load(p_later, mask=i + 1 < count, other=1.0)
            weights = tl.associative_scan(later, 0, _times, reverse=True)
        if (count == _TOKENS) | (initial != slot):
            states = _advance_by_records(
                states, p_k, p_u, p_decay, first, count, row, K, ROWS, BY_CHANNEL, LANES, PIECES
            )
            p_left = state + (slot * HV + head) * V * K + tile
            leave_states(p_left, states, mask & (slot != 0), K, LANES, PIECES, "evict_first")
            first = (first + count) % _RING
            count = 0
            b_k = tl.zeros_like(b_k)
            b_u = tl.zeros_like(b_u)
        last = (first + count + _RING - 1) % _RING
        totals = _pieces_or_one(p_total + last * D, count > 0, K, BY_CHANNEL, LANES, PIECES)
        p_row = prepared + seq.to(tl.int64) * (C + HV + HV * D)
        p_q = p_row + head // (HV // H) * K

        if EARLY:
            gdc_wait()
        parts_k, b_v, beta, decays = inputs_of_head(
            p_row, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES
        )
        b_q = tl.load(p_q + column, mask=column < K, other=0.0)
        b_key = tl.load(p_q + H * K + column, mask=column < K, other=0.0)
        b_decay = tl.load(p_row + C + HV + head * D + channel, mask=channel < D, other=0.0)
        totals = _scaled(totals, decays, len(totals))
        if BY_CHANNEL:
            b_k *= b_decay[None, :]
        of_k = tl.sum(b_k * b_key[None, :], 1)
        of_q = tl.sum(b_k * b_q[None, :], 1)
        if not BY_CHANNEL:
            weights *= decays[0]
            of_k *= weights
            of_q *= weights
        read_k = tl.sum(b_u * of_k[:, None], 0)
        read_q = tl.sum(b_u * of_q[:, None], 0)
        parts_q = pieces_of_row(p_q, K, LANES, PIECES)
        if BY_CHANNEL:
            read_k += read_states(states, _scaled(parts_k, totals, PIECES), PIECES)
            read_q += read_states(states, _scaled(parts_q, totals, PIECES), PIECES)
        else:
            read_k += read_states(states, parts_k, PIECES) * totals[0]
            read_q += read_states(states, parts_q, PIECES) * totals[0]
        b_new = beta * (b_v - read_k)
        b_o = tl.fma(tl.sum(b_q * b_key, 0) + tl.zeros_like(b_new), b_new, read_q)
        p_out = out + (token * HV + head) * V + index_v
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask)

        p_k, p_u, p_decay, p_total, p_mark = _records_of(
            chunk, slot, head, block, stride_chunk, H, HV, K, V, ROWS, BY_CHANNEL
        )
        place = (first + count) % _RING
        is_kept = slot != 0
        tl.debug_barrier()  # all threads of this program have read its mark
        tl.store(p_u + place * ROWS + row, tl.where(mask, b_new, 0.0), mask=is_kept)
        tl.store(p_mark, (first * (2 * _RING) + count + 1).to(tl.float32), mask=is_kept)
        if (block == 0) & is_kept:
            tl.store(p_decay + place * D + channel, b_decay, mask=channel < D)
            for piece in tl.static_range(len(totals)):
                if BY_CHANNEL:
                    index = piece * LANES + tl.arange(0, LANES)[None, :]
                    tl.store(p_total + place * D + index, totals[piece], mask=index < K)
                else:
                    tl.store(p_total + place, totals[piece])
            if head % (HV // H) == 0:
                tl.store(p_k + place * K + column, b_key, mask=column < K)

    if EARLY:
        gdc_wait()


@triton.jit
def _close_kernel(
    conv_state: tl.tensor,
    state: tl.tensor,
    chunk: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    stride_chunk: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Store ROWS rows of one head's state, and its share of a convolution's, to a sequence's slot.

    Grid: V / ROWS times heads times sequences. Nothing is moved where a slot has its state; a new
    sequence's slot loses its records alone.
    """
    C: tl.constexpr = 2 * H * K + HV * V
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    SHARE: tl.constexpr = (C + BLOCKS * HV - 1) // (BLOCKS * HV)
    pid = tl.program_id(0)
    seq = pid // (BLOCKS * HV)
    head = pid // BLOCKS % HV
    block = pid % BLOCKS
    row = tl.arange(0, ROWS)
    index_v = block * ROWS + row
    mask = index_v < V
    initial = tl.load(initial_indices + seq).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    p_k, p_u, p_decay, _, p_mark = _records_of(
        chunk, initial, head, block, stride_chunk, H, HV, K, V, ROWS, BY_CHANNEL
    )
    mark = tl.load(p_mark, mask=initial != 0, other=0.0).to(tl.int32)
    first = mark // (2 * _RING)
    count = mark % (2 * _RING)
    if (slot != 0) & (initial != 0) & ((count > 0) | (initial != slot)):
        tile = index_v[:, None] * K + tl.arange(0, LANES)[None, :]
        states = _load_states(state + (initial * HV + head) * V * K + tile, mask, K, LANES, PIECES)
        states = _advance_by_records(
            states, p_k, p_u, p_decay, first, count, row, K, ROWS, BY_CHANNEL, LANES, PIECES
        )
        p_left = state + (slot * HV + head) * V * K + tile
        leave_states(p_left, states, mask, K, LANES, PIECES, "evict_first")
        if initial != slot:
            for begin in tl.static_range(0, SHARE, CHANNELS):
                own = begin + tl.arange(0, CHANNELS)
                channel = pid % (BLOCKS * HV) * SHARE + own
                inside = (own < SHARE) & (channel < C)
                rows = last_inputs(conv_state + initial * (W - 1) * C + channel, inside, C, W)
                leave_inputs(conv_state + slot * (W - 1) * C + channel, rows, inside, C, W)
    _, _, _, _, p_mark = _records_of(
        chunk, slot, head, block, stride_chunk, H, HV, K, V, ROWS, BY_CHANNEL
    )
    tl.debug_barrier()  # all threads of this program have read its mark
    tl.store(p_mark, 0.0, mask=slot != 0)
