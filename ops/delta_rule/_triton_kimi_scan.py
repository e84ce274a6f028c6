# mypy: disable-error-code="untyped-decorator"
"""The scan of the chunk form: one program walks the chunks of a sequence with its state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_rule._triton_scan import (
    EVERY,
    UNEVEN,
    Prepared,
    ScanSegments,
    advance,
    is_uneven,
    read_state,
    scan_configs,
    stages_of_factors,
    write_state,
)
from torch_hybrid.ops.delta_rule.op import KimiDeltaAttention
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.products import (
    ROUNDED,
    load_pieces,
    rounded_dot,
    rows_dot,
    transpose_dot,
    transposed,
)
from torch_hybrid.ops.triton.segments import Launch
from torch_hybrid.ops.triton.state import zero_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRows(Prepared):
    """Inputs of the scan, by head.

    ``queries [T, H, K]``: rows of q, decayed from the chunk's start;
    ``reads [T, P, H, K]``, ``writes [T, P, H, K]``: rows of k, decayed from the start and until
    the end of the chunk;
    ``attend [X, H, C, C]``;
    ``factors [X, H, K]``: what the state decays by.
    """

    queries: Tensor
    reads: Tensor
    writes: Tensor


def scan(
    x: KimiDeltaAttention, prepared: PreparedRows, walks: ScanSegments
) -> tuple[Tensor, Launch]:
    """Allocate the outputs; the launch walks a segment of the chunks of all sequences.

    It fills in the outputs and advances the states.
    """
    v = x.v
    num_tokens, _, num_heads, head_dim_k = prepared.reads.shape
    head_dim_v, num_seqs = v.shape[-1], x.state_indices.shape[0]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    hopper = is_hopper(v.device)
    forms = scan_configs(
        v,
        num_heads * num_seqs,
        hopper=hopper,
        num_pieces=prepared.num_pieces,
        is_even=walks.is_even,
    )
    carry = walks.carry(x)

    def walk(first_block: int, last_block: int) -> None:
        for form in forms:
            _scan_kernel[(triton.cdiv(head_dim_v, form.block_v) * num_heads * num_seqs,)](
                prepared.queries,
                prepared.reads,
                prepared.writes,
                v,
                prepared.solve,
                prepared.attend,
                prepared.factors,
                x.state,
                x.cu_seqlens,
                x.initial_indices,
                x.state_indices,
                out,
                x.scale,
                num_tokens,
                num_seqs,
                carry,
                first_block,
                last_block,
                # A constant, so that a tile's rows lie at constant distances: fewer registers.
                STRIDE_V=v.stride(0),
                H=num_heads,
                K=head_dim_k,
                V=head_dim_v,
                C=prepared.solve.shape[-1],
                PS=prepared.num_pieces,
                BLOCK_K=max(16, triton.next_power_of_2(head_dim_k)),
                BLOCK_V=form.block_v,
                STEPS=form.steps,
                STAGES=stages_of_factors(prepared.num_pieces),
                num_warps=form.num_warps,
                num_stages=3 if hopper else 2,
                enable_fp_fusion=True,
            )

    return out, walk


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "first_block", "last_block"])
def _scan_kernel(
    queries: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    v: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    factors: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    carry: tl.tensor,
    first_block: tl.tensor,
    last_block: tl.tensor,
    STRIDE_V: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Walk a sequence's chunks of a segment with BLOCK_V rows of a head's state: one program.

    The grid is sequences by heads by rows of V; the tile of the state is in registers.
    All that it computes is the left side of its next product and has rows of V, tokens and
    channels are columns: numbers pass from product to product in registers.
    """
    if STEPS != EVERY:  # noqa: SIM102  (one of them is known when it is compiled)
        if is_uneven(cu_seqlens, num_seqs, H) != (STEPS == UNEVEN):
            return
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    NT: tl.constexpr = max(PS, 1)  # tensors that pieces are in
    UNIT: tl.constexpr = 0.0625 if PS == ROUNDED else 1.0  # float16 holds 2^16 of it
    pid = tl.program_id(0)
    seq = pid // (NUM_BLOCKS * H)
    head = pid // NUM_BLOCKS % H
    index_k = tl.arange(0, BLOCK_K)[None, :]
    index_v = pid % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = (index_k < K) | (K == BLOCK_K)
    mask_v = (index_v < V) | (V % BLOCK_V == 0)
    mask_s = mask_v[:, None] & mask_k

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if first_block == 0:
        # The rows past the last sequence are dealt out to the sequences in turn.
        padding = tl.load(cu_seqlens + num_seqs) + seq
        zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, H, V)

    before = begin // C + seq
    first = tl.maximum(first_block - before, 0) * C
    last = tl.minimum((last_block - before) * C, end - begin)
    if first < last:
        row = tl.arange(0, C)
        tile_q = row[:, None] * (H * K) + index_k
        tile_k = row[:, None] * (NT * H * K) + index_k
        square = row[:, None] * C + row[None, :]
        tile_v = index_v[None, :] + row[:, None] * STRIDE_V
        everywhere = square >= 0
        tile_out = index_v[:, None] + row[None, :] * (H * V)
        zeros = tl.zeros([BLOCK_V, C], dtype=tl.float32)
        chunk = (before + first // C).to(tl.int64) * H + head

        tile_s = index_v[:, None] * K + index_k
        is_first = first == 0
        b_s = read_state(
            state, carry, initial_indices, seq, is_first, head, tile_s, mask_s, H, V * K
        )
        b_s *= UNIT
        for done in tl.range(first, last, C, num_stages=STAGES):
            # From the token each time: one number to keep instead of five places.
            token = (begin + done).to(tl.int64)
            p_rows = (token * NT * H + head) * K + tile_k
            mask_t = done + row < end - begin
            mask_tk = mask_t[:, None] & mask_k
            decay = tl.load(factors + chunk * K + index_k, mask=mask_k, other=0.0)

            b_k = load_pieces(reads + p_rows, H * K, NT, mask_tk)
            b_x = rows_dot(b_s, transposed(b_k), zeros, PS)
            p_v = v + token * STRIDE_V + head * V + tile_v
            b_v = tl.load(p_v, mask=mask_t[:, None] & mask_v[None, :], other=0.0)
            b_x = transpose_dot(b_v, -b_x, UNIT)
            b_q = tl.load(queries + (token * H + head) * K + tile_q, mask=mask_tk, other=0.0)
            b_o = rounded_dot(b_s, tl.trans(b_q), zeros, PS)

            b_t = load_pieces(solve + chunk * NT * C * C + square, C * C, NT, everywhere)
            b_u = rows_dot(b_x, transposed(b_t), zeros, PS)
            b_a = tl.load(attend + chunk * (C * C) + square)
            b_o = rounded_dot(b_u, tl.trans(b_a), b_o, PS) * (scale * (1.0 / UNIT))
            mask_out = mask_v[:, None] & mask_t[None, :]
            tl.store(
                out + (token * H + head) * V + tile_out, b_o.to(out.dtype.element_ty), mask=mask_out
            )

            b_k = load_pieces(writes + p_rows, H * K, NT, mask_tk)
            b_s = advance(b_s, decay, b_u, b_k, PS)
            chunk += H
        b_s *= 1.0 / UNIT
        is_last = last == end - begin
        tile_s = index_v[:, None] * K + index_k
        write_state(b_s, state, carry, state_indices, seq, is_last, head, tile_s, mask_s, H, V * K)
