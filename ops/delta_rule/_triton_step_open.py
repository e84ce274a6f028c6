"""Delta rules' decode steps by open chunks (``ops/open_chunk.py``).

A step is three launches, as in ``_triton_step.py``; the second reads states and records, and
stores a state when the chunk is full.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.delta_rule._triton_step import (
    Rule,
    inputs_of_head,
    launch_norm,
    launch_prepare,
)
from torch_hybrid.ops.delta_rule.op_step import DeltaStep
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.open_chunk import (
    close_chunks,
    leave_record,
    open_grid,
    open_states,
    open_tile,
    read_opened,
    read_records,
    scaled,
)
from torch_hybrid.ops.triton.state_pieces import pieces_of_row


def launch_open_step(x: DeltaStep, rule: Rule) -> Tensor:
    """Run a token of each sequence that has one; without any token, close all chunks."""
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    if x.state_indices.shape[0] == 0:
        return out.zero_()
    if not len(x.qkv):
        close_chunks(x, x.conv_state)
        return out
    tile = open_tile(x)
    sizes = {name: tile[name] for name in ("H", "HV", "K", "V", "BY_CHANNEL")}
    prepared = launch_prepare(x, rule, sizes | {"DRAFTS": 0})
    bind(_open_kernel, x)[open_grid(x)](
        prepared=prepared,
        out=out,
        BLOCK_K=triton.next_power_of_2(x.state.shape[3]),
        **tile,
    )
    launch_norm(out, x, rule)
    return out


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
    another slot.

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
    index_v = block * ROWS + tl.arange(0, ROWS)
    mask = index_v < V
    token = tl.load(cu_seqlens + seq).to(tl.int64)
    if tl.load(cu_seqlens + seq + 1) > token:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        states, b_k, b_u, weights, totals, first, count = open_states(
            state,
            chunk,
            stride_chunk,
            initial,
            slot,
            head,
            block,
            H,
            HV,
            K,
            V,
            BY_CHANNEL,
            PIECES,
            LANES,
            ROWS,
            BLOCK_K,
        )
        p_row = prepared + seq.to(tl.int64) * (C + HV + HV * D)
        p_q = p_row + head // (HV // H) * K
        column = tl.arange(0, BLOCK_K)

        if EARLY:
            gdc_wait()
        parts_k, b_v, beta, decays = inputs_of_head(
            p_row, head, index_v, mask, H, HV, K, V, BY_CHANNEL, LANES, PIECES
        )
        b_q = tl.load(p_q + column, mask=column < K, other=0.0)
        b_key = tl.load(p_q + H * K + column, mask=column < K, other=0.0)
        totals = scaled(totals, decays, len(totals))
        b_decay = decays[0]
        if BY_CHANNEL:
            p_decay = p_row + C + HV + head * K + column
            b_decay = tl.load(p_decay, mask=column < K, other=0.0)
            b_k *= b_decay[None, :]
        else:
            weights *= b_decay
        read_k = read_records(b_k, b_u, weights, b_key, BY_CHANNEL)
        read_q = read_records(b_k, b_u, weights, b_q, BY_CHANNEL)
        parts_q = pieces_of_row(p_q, K, LANES, PIECES)
        read_k += read_opened(states, totals, parts_k, BY_CHANNEL, PIECES)
        read_q += read_opened(states, totals, parts_q, BY_CHANNEL, PIECES)
        b_new = beta * (b_v - read_k)
        b_o = tl.fma(tl.sum(b_q * b_key, 0) + tl.zeros_like(b_new), b_new, read_q)
        p_out = out + (token * HV + head) * V + index_v
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask)
        leave_record(
            chunk,
            stride_chunk,
            slot,
            head,
            block,
            first,
            count,
            b_new,
            b_key,
            b_decay,
            totals,
            H,
            HV,
            K,
            V,
            BY_CHANNEL,
            LANES,
            ROWS,
            BLOCK_K,
        )

    if EARLY:
        gdc_wait()
