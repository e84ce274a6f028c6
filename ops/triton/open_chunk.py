"""Decode steps by open chunks (``ops/open_chunk.py``): what all of them read and add, and their
closing.

A step's kernel opens a head's states, reads them by vectors of its token, and leaves a record.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.open_chunk import OPEN_TOKENS, RING, OpenStep
from torch_hybrid.ops.triton.conv_step import last_inputs, leave_inputs
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.state_pieces import (
    PIECE,
    leave_states,
    load_states,
    read_states,
)

_WARPS = 2  # of a program
_CHANNELS = 512  # of a convolution's state that a program of a closing moves at once
_TOKENS: tl.constexpr = tl.constexpr(OPEN_TOKENS)
_RING: tl.constexpr = tl.constexpr(RING)


def open_tile(x: OpenStep) -> dict[str, Any]:
    """Give the sizes of heads, and how programs hold rows of their states."""
    num_v_heads, head_dim_v, head_dim_k = x.state_shape
    rows, block_k = x.layout.rows(head_dim_v, head_dim_k), triton.next_power_of_2(head_dim_k)
    return {
        "H": x.num_k_heads,
        "HV": num_v_heads,
        "K": head_dim_k,
        "V": head_dim_v,
        "BY_CHANNEL": x.layout.by_channel,
        "PIECES": triton.cdiv(head_dim_k, PIECE),
        "LANES": PIECE,
        "ROWS": rows,
        "num_warps": max(1, _WARPS * rows * block_k // x.layout.numbers),
        "enable_fp_fusion": False,
    }


def open_grid(x: OpenStep) -> tuple[int]:
    """Count the programs: blocks of rows times heads times sequences."""
    num_v_heads, head_dim_v, head_dim_k = x.state_shape
    num_blocks = triton.cdiv(head_dim_v, x.layout.rows(head_dim_v, head_dim_k))
    return (num_blocks * num_v_heads * x.state_indices.shape[0],)


def close_chunks(x: OpenStep, conv_state: Tensor | None) -> None:
    """Store the states of all sequences in one launch, and the inputs of their convolutions."""
    taps, channels = (0, 0) if conv_state is None else conv_state.shape[1:]
    bind(_close_kernel, x)[open_grid(x)](
        conv_state=conv_state, C=channels, W=taps + 1, CHANNELS=_CHANNELS, **open_tile(x)
    )


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
def scaled(parts: tl.tuple, factors: tl.tuple, PIECES: tl.constexpr) -> tl.tuple:
    """Multiply pieces by pieces, or by one factor."""
    products = ()
    for piece in tl.static_range(PIECES):
        b_x = parts[piece] * factors[piece % len(factors)]
        products = products + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    return products


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
def open_states(
    state: tl.tensor,
    chunk: tl.tensor,
    stride_chunk: tl.tensor,
    initial: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    block: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tuple:
    """Load rows of a head's state and its open chunk.

    The state is stored, by all of its records, if the chunk is full or began in another slot. Keys
    by channel are decayed by the tokens after theirs; else weights are these decays.

    Returns the state in pieces, keys [TOKENS, BLOCK_K], values [TOKENS, ROWS], weights [TOKENS] and
    the chunk's total decays. After these come its first record, and how many there are.
    """
    D: tl.constexpr = K if BY_CHANNEL else 1
    row = tl.arange(0, ROWS)
    index_v = block * ROWS + row
    mask = index_v < V
    tile = index_v[:, None] * K + tl.arange(0, LANES)[None, :]
    p_state = state + (initial * HV + head) * V * K + tile
    states = load_states(p_state, mask & (initial != 0), K, LANES, PIECES, "evict_first")
    p_k, p_u, p_decay, p_total, p_mark = _records_of(
        chunk, initial, head, block, stride_chunk, H, HV, K, V, ROWS, BY_CHANNEL
    )
    mark = tl.load(p_mark, mask=initial != 0, other=0.0).to(tl.int32)
    first = mark // (2 * _RING)
    count = mark % (2 * _RING)
    i = tl.arange(0, _TOKENS)
    at = (first + i) % _RING
    column = tl.arange(0, BLOCK_K)
    inside = (column < K)[None, :]
    p_keys = p_k + at[:, None] * K + column[None, :]
    b_k = tl.load(p_keys, mask=(i < count)[:, None] & inside, other=0.0)
    b_u = tl.load(p_u + at[:, None] * ROWS + row[None, :], mask=(i < count)[:, None], other=0.0)
    p_later = p_decay + (first + i + 1) % _RING * D
    if BY_CHANNEL:
        is_later = (i + 1 < count)[:, None] & inside
        later = tl.load(p_later[:, None] + column[None, :], mask=is_later, other=1.0)
        b_k *= tl.associative_scan(later, 0, _times, reverse=True)
        weights = tl.full([_TOKENS], 1.0, tl.float32)
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
    return states, b_k, b_u, weights, totals, first, count


@triton.jit
def read_records(
    b_k: tl.tensor, b_u: tl.tensor, weights: tl.tensor, b_x: tl.tensor, BY_CHANNEL: tl.constexpr
) -> tl.tensor:
    """Multiply rows of what an open chunk adds to a state by a vector [BLOCK_K].

    Keys or weights are decayed by the vector's own token; so are the totals below.
    """
    of_x = tl.sum(b_k * b_x[None, :], 1)
    if not BY_CHANNEL:
        of_x *= weights
    return tl.sum(b_u * of_x[:, None], 0)


@triton.jit
def read_opened(
    states: tl.tuple,
    totals: tl.tuple,
    parts_x: tl.tuple,
    BY_CHANNEL: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """Multiply rows of a decayed state by a vector, both in pieces."""
    if BY_CHANNEL:
        read = read_states(states, scaled(parts_x, totals, PIECES), PIECES)
    else:
        read = read_states(states, parts_x, PIECES) * totals[0]
    return read


@triton.jit
def leave_record(
    chunk: tl.tensor,
    stride_chunk: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    block: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    b_u: tl.tensor,
    b_key: tl.tensor,
    b_decay: tl.tensor,
    totals: tl.tuple,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Add a token's record where none is read, unless its slot is the null slot.

    The first program of a head stores its decays, [BLOCK_K] or one, and the first of a key head the
    key [BLOCK_K]. Rows of ``b_u`` past V may hold anything.
    """
    p_k, p_u, p_decay, p_total, p_mark = _records_of(
        chunk, slot, head, block, stride_chunk, H, HV, K, V, ROWS, BY_CHANNEL
    )
    place = (first + count) % _RING
    row = tl.arange(0, ROWS)
    is_kept = slot != 0
    tl.debug_barrier()  # all threads of this program have read its mark
    p_own = p_u + place * ROWS + row
    tl.store(p_own, tl.where(block * ROWS + row < V, b_u, 0.0), mask=is_kept)
    tl.store(p_mark, (first * (2 * _RING) + count + 1).to(tl.float32), mask=is_kept)
    if (block == 0) & is_kept:
        column = tl.arange(0, BLOCK_K)
        if BY_CHANNEL:
            tl.store(p_decay + place * K + column, b_decay, mask=column < K)
        else:
            tl.store(p_decay + place, b_decay)
        for piece in tl.static_range(len(totals)):
            if BY_CHANNEL:
                index = piece * LANES + tl.arange(0, LANES)[None, :]
                tl.store(p_total + place * K + index, totals[piece], mask=index < K)
            else:
                tl.store(p_total + place, totals[piece])
        if head % (HV // H) == 0:
            tl.store(p_k + place * K + column, b_key, mask=column < K)


@triton.jit
def _close_kernel(
    conv_state: tl.tensor | None,
    state: tl.tensor,
    chunk: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    stride_chunk: tl.tensor,
    C: tl.constexpr,
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
        p_state = state + (initial * HV + head) * V * K + tile
        states = load_states(p_state, mask, K, LANES, PIECES, "evict_first")
        states = _advance_by_records(
            states, p_k, p_u, p_decay, first, count, row, K, ROWS, BY_CHANNEL, LANES, PIECES
        )
        p_left = state + (slot * HV + head) * V * K + tile
        leave_states(p_left, states, mask, K, LANES, PIECES, "evict_first")
        if conv_state is not None and initial != slot:
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
