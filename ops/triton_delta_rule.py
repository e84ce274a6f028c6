# mypy: disable-error-code="untyped-decorator"
"""What the chunk forms of delta rules share in Triton: the system of a chunk, and the scan.

A chunk's part that does not depend on the state is prepared for all chunks in parallel; then one
program for each sequence, head and block of V's rows walks the chunks with its state in
registers. READMEs of the families derive it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton_devices import is_hopper
from torch_hybrid.ops.triton_products import (
    exact_dot,
    piece_dot,
    piece_dtype,
    pieces_of_outputs,
    pieces_of_states,
)
from torch_hybrid.ops.triton_ragged import num_blocks
from torch_hybrid.ops.triton_state import zero_rows


def max_chunk(dtype: torch.dtype, device: torch.device) -> int:
    """The longest chunk whose matrices, in the pieces of ``dtype``, registers hold."""
    if dtype != torch.bfloat16:
        return 16
    return 64 if is_hopper(device) else 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the scan takes of X chunks of C tokens, by head. P counts pieces of numbers.

    ``solve [P, X, HV, C, C]``: inverse of a chunk's system, times beta of each column;
    ``attend [P, X, HV, C, C]``: decayed products of q and k, with the scale;
    ``factors`` float32: ``[X, HV, 4, C]``, of rows of k and of q that read the state before the
    chunk, of rows of k that write the state after it, and what the state decays by; or, where
    channels decay on their own and rows come decayed, ``[X, HV, K]``, the last of these.
    """

    solve: Tensor
    attend: Tensor
    factors: Tensor

    @classmethod
    def empty(
        cls, q: Tensor, num_seqs: int, num_heads: int, chunk: int, factors: tuple[int, ...]
    ) -> Prepared:
        """Uninitialised, for any ``num_seqs`` sequences of the tokens of q [T, H, K]."""
        shape = (num_blocks(q.shape[0], num_seqs, chunk), num_heads)

        def squares(num_pieces: int) -> Tensor:
            dtype = piece_dtype(q.dtype)
            return q.new_empty(num_pieces, *shape, chunk, chunk, dtype=dtype)

        return cls(
            solve=squares(pieces_of_states(q.dtype)),
            attend=squares(pieces_of_outputs(q.dtype)),
            factors=q.new_empty(*shape, *factors, dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows ``[P, T, H, K]`` of q and k, in pieces, as they read and write the state.

    ``reads`` and ``writes`` are of k, and one tensor where channels do not decay on their own.
    """

    queries: Tensor
    reads: Tensor
    writes: Tensor


def scan(
    prepared: Prepared,
    rows: Rows,
    v: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """Walk the chunks of every sequence; advances ``state`` and returns the outputs."""
    _, _, num_k_heads, head_dim_k = rows.reads.shape
    num_tokens, num_v_heads, head_dim_v = v.shape
    num_seqs = state_indices.shape[0]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    wide = is_hopper(v.device) and v.dtype != torch.float32
    block_v = max(16, min(32 if wide else 16, triton.next_power_of_2(head_dim_v)))
    _scan_kernel[(triton.cdiv(head_dim_v, block_v) * num_v_heads * num_seqs,)](
        rows.queries,
        rows.reads,
        rows.writes,
        v,
        prepared.solve,
        prepared.attend,
        prepared.factors,
        state,
        cu_seqlens,
        state_indices,
        has_initial_state,
        out,
        num_tokens,
        num_seqs,
        rows.queries.stride(0),
        rows.queries.stride(1),
        rows.reads.stride(0),
        rows.reads.stride(1),
        v.stride(0),
        prepared.solve.stride(0),
        H=num_k_heads,
        HV=num_v_heads,
        K=head_dim_k,
        V=head_dim_v,
        C=prepared.solve.shape[-1],
        PQ=rows.queries.shape[0],
        PK=rows.reads.shape[0],
        PS=prepared.solve.shape[0],
        CHANNELS=prepared.factors.ndim == 3,
        BLOCK_K=max(16, triton.next_power_of_2(head_dim_k)),
        BLOCK_V=block_v,
        num_warps=8 if v.dtype == torch.float32 else 4,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def inverse(system: tl.tensor, C: tl.constexpr, PIECES: tl.constexpr) -> tl.tensor:
    """``(I + system)^-1`` of a strictly lower triangular ``system [C, C]``.

    Of blocks on the diagonal, each time of twice the size: the inverse of [[A, 0], [B, D]] has
    -D^-1 B A^-1 below the diagonal. No powers of the system are formed: with keys that are alike
    they grow until nothing is left of the inverse.
    """
    if C <= 32:
        solved = _inverse_by_levels(system, C, PIECES)
    else:
        HALF: tl.constexpr = C // 2
        cut = tl.permute(tl.reshape(system, [2, HALF, 2, HALF]), [1, 3, 0, 2])
        left, right = tl.split(cut)
        upper, below = tl.split(left)
        zeros, lower = tl.split(right)
        upper = _inverse_by_levels(upper, HALF, PIECES)
        lower = _inverse_by_levels(lower, HALF, PIECES)
        product = exact_dot(lower, below, zeros, PIECES)
        below = -exact_dot(product, upper, zeros, PIECES)
        joined = tl.join(tl.join(upper, below), tl.join(zeros, lower))
        solved = tl.reshape(tl.permute(joined, [2, 0, 3, 1]), [C, C])
    return solved


@triton.jit
def _inverse_by_levels(system: tl.tensor, C: tl.constexpr, PIECES: tl.constexpr) -> tl.tensor:
    """The same with products of the whole size, which small ones fill as well."""
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    zeros = tl.zeros([C, C], dtype=tl.float32)
    solved = (row == column).to(tl.float32)
    solved -= tl.where((row % 2 == 1) & (column == row - 1), system, 0.0)
    size = 2
    while size < C:
        row_block = row // size
        is_below = (row_block % 2 == 1) & (column // size == row_block - 1)
        product = exact_dot(solved, tl.where(is_below, system, 0.0), zeros, PIECES)
        solved -= exact_dot(product, solved, zeros, PIECES)
        size *= 2
    return solved


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
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
    state_indices: tl.tensor,
    has_initial_state: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_piece: tl.tensor,
    stride_q: tl.tensor,
    stride_k_piece: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_square: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PQ: tl.constexpr,
    PK: tl.constexpr,
    PS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program: BLOCK_V rows of the state of one value head of one sequence, all its chunks.

    The state is held transposed, [K, BLOCK_V].
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (NUM_BLOCKS * HV)
    head_v = pid // NUM_BLOCKS % HV
    head_k = head_v // (HV // H)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    mask_s = mask_k[:, None] & mask_v[None, :]

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    slot = tl.load(state_indices + seq).to(tl.int64)
    if slot == 0:
        zero_rows(out, begin, end, 1, head_v, index_v, mask_v, HV, V)
    elif begin < end:
        row = tl.arange(0, C)
        first = begin.to(tl.int64)
        base_q = first * stride_q + head_k * K
        base_k = first * stride_k + head_k * K
        p_v = v + first * stride_v + head_v * V + index_v
        p_out = out + (first * HV + head_v) * V + index_v
        p_s = state + (slot * HV + head_v) * V * K + index_v[None, :] * K + index_k[:, None]
        chunk = (begin // C + seq).to(tl.int64) * HV + head_v

        known = tl.load(has_initial_state + seq) != 0
        b_s = tl.load(p_s, mask=mask_s & known, other=0.0)
        for done in range(0, end - begin, C):
            mask_t = done + row < end - begin
            mask_tk = mask_t[:, None] & mask_k[None, :]
            mask_tv = mask_t[:, None] & mask_v[None, :]
            b_v = tl.load(p_v[None, :] + row[:, None] * stride_v, mask=mask_tv, other=0.0)
            tile_q = row[:, None] * stride_q + index_k[None, :]
            tile_k = row[:, None] * stride_k + index_k[None, :]
            square = chunk * C * C + row[:, None] * C + row[None, :]

            # Pieces from the last: what is small is added up before what is large.
            b_x = tl.zeros([C, BLOCK_V], dtype=tl.float32)
            b_o = tl.zeros([C, BLOCK_V], dtype=tl.float32)
            for piece in tl.static_range(PK - 1, -1, -1):
                p_k = reads + (base_k + piece * stride_k_piece) + tile_k
                b_k = tl.load(p_k, mask=mask_tk, other=0.0)
                b_x = piece_dot(b_k, b_s, b_x, PS - piece)
            for piece in tl.static_range(PQ - 1, -1, -1):
                p_q = queries + (base_q + piece * stride_q_piece) + tile_q
                b_q = tl.load(p_q, mask=mask_tk, other=0.0)
                b_o = piece_dot(b_q, b_s, b_o, PQ - piece)
            if CHANNELS:
                b_s *= tl.load(factors + chunk * K + index_k, mask=mask_k, other=0.0)[:, None]
            else:
                p_f = factors + chunk * 4 * C
                b_x *= tl.load(p_f + row)[:, None]
                b_o *= tl.load(p_f + C + row)[:, None]
                b_s *= tl.load(p_f + 3 * C)

            b_x = b_v.to(tl.float32) - b_x
            b_u = tl.zeros([C, BLOCK_V], dtype=tl.float32)
            for piece in tl.static_range(PS - 1, -1, -1):
                b_solve = tl.load(solve + piece * stride_square + square)
                b_u = piece_dot(b_solve, b_x, b_u, PS - piece)
            for piece in tl.static_range(PQ - 1, -1, -1):
                b_attend = tl.load(attend + piece * stride_square + square)
                b_o = piece_dot(b_attend, b_u, b_o, PQ - piece)
            if not CHANNELS:
                b_u *= tl.load(p_f + 2 * C + row)[:, None]
            if PK == 1 and not CHANNELS:
                b_s = piece_dot(tl.trans(b_k), b_u, b_s, PS)
            else:
                update = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
                for piece in tl.static_range(PK - 1, -1, -1):
                    p_k = writes + (base_k + piece * stride_k_piece) + tile_k
                    b_k = tl.load(p_k, mask=mask_tk, other=0.0)
                    update = piece_dot(tl.trans(b_k), b_u, update, PS - piece)
                b_s += update
            p_o = p_out[None, :] + row[:, None] * (HV * V)
            tl.store(p_o, b_o.to(out.dtype.element_ty), mask=mask_tv)

            base_q += C * stride_q
            base_k += C * stride_k
            p_v += C * stride_v
            p_out += C * HV * V
            chunk += HV
        tl.store(p_s, b_s, mask=mask_s)

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head_v, index_v, mask_v, HV, V)
