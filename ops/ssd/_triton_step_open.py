"""Decode steps of Mamba2 and lightning attention by open chunks (``ops/open_chunk.py``).

What a token adds to a state does not depend on it: stored states have the bits that steps without
chunks leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.ssd._triton_token import fixed_decay, gated, step_size
from torch_hybrid.ops.ssd.op_step_lightning import LightningStep
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep
from torch_hybrid.ops.triton.decays import exp
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.open_chunk import (
    leave_record,
    open_grid,
    open_states,
    open_tile,
    read_opened,
    read_records,
    scaled,
)
from torch_hybrid.ops.triton.state import zero_rows
from torch_hybrid.ops.triton.state_pieces import pieces_of_row


def read_open_chunks(
    x: SsdStep | LightningStep,
    rows: Tensor,
    out: Tensor,
    places: Mapping[str, int],
    **given: Any,
) -> None:
    """Add a record of each sequence's token, and store what is read of states and chunks in
    ``out``.

    Args:
        x: arguments of the step.
        rows: [T, ...] what the launch before this one makes of the tokens.
        out: [T, HV V] outputs, before a norm.
        places: VALUES, KEYS and QUERIES: where these begin in a row.
        given: parameters of the kernel that ``x`` has not, or has otherwise.
    """
    bind(_open_kernel, x)[open_grid(x)](
        rows=rows,
        out=out,
        WIDTH=rows.shape[1],
        BLOCK_K=triton.next_power_of_2(x.state.shape[3]),
        **places,
        **given,
        **open_tile(x),
    )


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _open_kernel(
    rows: tl.tensor,
    z: tl.tensor | None,
    dt: tl.tensor | None,
    A_log: tl.tensor | None,
    dt_bias: tl.tensor | None,
    D: tl.tensor | None,
    slopes: tl.tensor | None,
    state: tl.tensor,
    chunk: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    rounded: tl.tensor,
    dt_min: tl.tensor | None,
    dt_max: tl.tensor | None,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_z: tl.tensor,
    stride_dt: tl.tensor,
    stride_chunk: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Read ROWS rows of one head's state and its open chunk with a token's query, and add its
    record.

    Grid: V / ROWS times heads times sequences. Registers: the rows, in PIECES pieces of LANES
    columns, and the chunk's keys and values. Pipeline: states, records, the step size and the gate
    are loaded before the launch before has ended. Memory: the state is stored if the chunk is full,
    or if it began in another slot.

    Every program waits, as in ``_triton_step_mamba2.py``. Decays are of step sizes, or of slopes
    where there are some. Outputs are rounded to the dtype of ``rounded``.
    """
    if EARLY:
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    seq = pid // (BLOCKS * HV)
    head = pid // BLOCKS % HV
    block = pid % BLOCKS
    index_v = block * ROWS + tl.arange(0, ROWS)
    mask_v = index_v < V
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
        if slopes is not None:
            decay = fixed_decay(tl.load(slopes + head))
        else:
            x_dt = tl.load(dt + token * stride_dt + head).to(tl.float32)
            bias = tl.load(dt_bias + head).to(tl.float32)
            step = step_size(x_dt + bias, dt_min, dt_max)
            decay = exp(-exp(tl.load(A_log + head).to(tl.float32)) * step)
        b_z = None
        if z is not None:
            p_z = z + token * stride_z + head * V + index_v
            b_z = tl.load(p_z, mask=mask_v, other=0.0).to(tl.float32)
        totals = scaled(totals, (decay,), 1)
        weights *= decay
        column = tl.arange(0, BLOCK_K)
        p_row = rows + token * WIDTH
        p_value = p_row + VALUES + head * V + index_v
        p_key = p_row + KEYS + head // (HV // H) * K
        p_query = p_row + QUERIES + head // (HV // H) * K

        if EARLY:
            gdc_wait()
        b_x = tl.load(p_value, mask=mask_v, other=0.0).to(tl.float32)
        b_key = tl.load(p_key + column, mask=column < K, other=0.0).to(tl.float32)
        b_q = tl.load(p_query + column, mask=column < K, other=0.0).to(tl.float32)
        b_new = b_x if slopes is not None else b_x * step
        b_o = read_records(b_k, b_u, weights, b_q, BY_CHANNEL)
        parts_q = pieces_of_row(p_query, K, LANES, PIECES)
        b_o += read_opened(states, totals, parts_q, BY_CHANNEL, PIECES)
        b_o = tl.fma(tl.sum(b_q * b_key, 0) + tl.zeros_like(b_new), b_new, b_o)
        if D is not None:
            b_o = tl.fma(b_x, tl.load(D + head).to(tl.float32) + tl.zeros_like(b_x), b_o)
        b_o = gated(b_o.to(rounded.dtype.element_ty), b_z)
        p_out = out + token * HV * V + head * V + index_v
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_v)
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
            decay,
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
    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, HV, V)
