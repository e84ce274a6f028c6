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

from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.products import (
    exact_dot,
    piece_dot,
    piece_dtype,
    pieces_of_outputs,
    pieces_of_states,
    transpose_dot,
)
from torch_hybrid.ops.triton.ragged import num_blocks
from torch_hybrid.ops.triton.state import zero_rows


def chunk_length(q: Tensor) -> int:
    """Tokens of a chunk whose rows of q and matrices, in pieces, registers and memory hold."""
    if q.dtype != torch.bfloat16:
        return 16
    return 64 if is_hopper(q.device) and q.shape[-1] <= 128 else 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the scan takes of X chunks of C tokens, by head. P counts pieces of numbers.

    ``solve [X, HV, P, C, C]``: inverse of a chunk's system, times beta of each column;
    ``attend [X, HV, P, C, C]``: decayed products of q and k, with the scale;
    ``factors`` float32: ``[X, HV, 4, C]``, of rows of k and of q that read the state before the
    chunk, of rows of k that write the state after it, and what the state decays by; or, where
    channels decay on their own and rows come decayed, ``[X, HV, K]``, the last of these;
    ``scratch [X, HV, C, 16]`` float32, see :func:`inverse`.
    """

    solve: Tensor
    attend: Tensor
    factors: Tensor
    scratch: Tensor

    @classmethod
    def empty(
        cls, q: Tensor, num_seqs: int, num_heads: int, chunk: int, *, factors: tuple[int, ...]
    ) -> Prepared:
        """Uninitialised, for any ``num_seqs`` sequences of the tokens of q [T, H, K]."""
        shape = (num_blocks(q.shape[0], num_seqs, chunk), num_heads)

        def squares(num_pieces: int) -> Tensor:
            dtype = piece_dtype(q.dtype)
            return q.new_empty(*shape, num_pieces, chunk, chunk, dtype=dtype)

        return cls(
            solve=squares(pieces_of_states(q.dtype)),
            attend=squares(pieces_of_outputs(q.dtype)),
            factors=q.new_empty(*shape, *factors, dtype=torch.float32),
            scratch=q.new_empty(*shape, chunk, 16, dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows ``[T, P, H, K]`` of q and k, in pieces, as they read and write the state.

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
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """Walk the chunks of every sequence; advances ``state`` and returns the outputs."""
    _, num_pieces, num_k_heads, head_dim_k = rows.reads.shape
    num_tokens, num_v_heads, head_dim_v = v.shape
    num_seqs = state_indices.shape[0]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    # 16 rows for each warp's products, or as many as registers hold.
    wide = is_hopper(v.device) and head_dim_k <= 128 and v.dtype != torch.float32
    most = 64 if wide else 16
    block_v = max(16, min(most, triton.next_power_of_2(head_dim_v)))
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
        initial_indices,
        state_indices,
        out,
        num_tokens,
        num_seqs,
        # Constants, so that a tile's rows lie at constant distances: fewer registers.
        STRIDE_Q=rows.queries.stride(0),
        STRIDE_K=rows.reads.stride(0),
        STRIDE_V=v.stride(0),
        H=num_k_heads,
        HV=num_v_heads,
        K=head_dim_k,
        V=head_dim_v,
        C=prepared.solve.shape[-1],
        PQ=rows.queries.shape[1],
        PK=num_pieces,
        PS=prepared.solve.shape[2],
        CHANNELS=prepared.factors.ndim == 3,
        BLOCK_K=max(16, triton.next_power_of_2(head_dim_k)),
        BLOCK_V=block_v,
        num_warps=8 if v.dtype == torch.float32 else 4,
        num_stages=3 if is_hopper(v.device) and head_dim_k <= 128 else 2,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def inverse(
    system: tl.tensor,
    scratch: tl.tensor,
    C: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """``(I + system)^-1`` of a strictly lower triangular ``system [C, C]``.

    Of blocks of 16 on the diagonal by substitution, then each time of twice the size: the inverse
    of [[A, 0], [B, D]] has -D^-1 B A^-1 below the diagonal. No powers of the system are formed:
    with keys that are alike they grow until nothing is left of the inverse.

    Blocks pass from thread to thread through ``scratch``, 16 C numbers that are this program's.
    """
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    diagonal = row // 16 == column // 16
    place = row * 16 + column % 16
    tl.store(scratch + place, system, mask=diagonal)
    tl.debug_barrier()
    _invert_blocks(scratch, C)
    solved = tl.load(scratch + place, mask=diagonal, other=0.0)
    zeros = tl.zeros([C, C], dtype=tl.float32)
    size = 16
    while size < C:
        row_block = row // size
        is_below = (row_block % 2 == 1) & (column // size == row_block - 1)
        product = exact_dot(solved, tl.where(is_below, system, 0.0), zeros, PIECES)
        solved -= exact_dot(product, solved, zeros, PIECES)
        size *= 2
    return solved


@triton.jit
def _invert_blocks(scratch: tl.tensor, C: tl.constexpr) -> None:
    """Put in the place of each strictly lower ``X [16, 16]`` in scratch ``(I + X)^-1``.

    A thread computes one column of one block, all of it in registers.
    """
    index = tl.arange(0, C)
    block = scratch + index // 16 * 256
    column = index % 16
    rows = ((column == 0).to(tl.float32),)
    for i in tl.static_range(1, 16):
        x = (column == i).to(tl.float32)
        for j in tl.static_range(i):
            x -= tl.load(block + (i * 16 + j)) * rows[j]
        rows = rows + (x,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no unpacking)
    tl.debug_barrier()
    for i in tl.static_range(16):
        tl.store(block + (i * 16 + column), rows[i])
    tl.debug_barrier()


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
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
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

    All that it computes is the left side of its next product and has rows of V, tokens and
    channels are columns: numbers pass from product to product in registers.
    """
    F: tl.constexpr = K if CHANNELS else 4 * C
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (NUM_BLOCKS * HV)
    head_v = pid // NUM_BLOCKS % HV
    head_k = head_v // (HV // H)
    index_k = tl.arange(0, BLOCK_K)[None, :]
    index_v = pid % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = (index_k < K) | (K == BLOCK_K)
    mask_v = (index_v < V) | (V % BLOCK_V == 0)
    mask_s = mask_v[:, None] & mask_k

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head_v, index_v, mask_v, HV, V)

    if begin < end:
        row = tl.arange(0, C)
        tile_q = row[:, None] * STRIDE_Q + index_k
        tile_k = row[:, None] * STRIDE_K + index_k
        square = row[:, None] * C + row[None, :]
        tile_v = index_v[None, :] + row[:, None] * STRIDE_V
        tile_out = index_v[:, None] + row[None, :] * (HV * V)
        chunk = (begin // C + seq).to(tl.int64) * HV + head_v

        initial = tl.load(initial_indices + seq).to(tl.int64)
        p_s = state + (initial * HV + head_v) * V * K + index_v[:, None] * K + index_k
        b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)
        for done in range(0, end - begin, C):
            # From the token each time: one number to keep instead of five places.
            token = (begin + done).to(tl.int64)
            p_q = queries + token * STRIDE_Q + head_k * K
            p_reads = reads + token * STRIDE_K + head_k * K
            p_writes = writes + token * STRIDE_K + head_k * K
            p_v = v + token * STRIDE_V + head_v * V
            p_out = out + (token * HV + head_v) * V
            mask_t = done + row < end - begin
            mask_tk = mask_t[:, None] & mask_k
            p_f = factors + chunk * F
            p_solve = solve + chunk * PS * C * C
            p_attend = attend + chunk * PQ * C * C
            if CHANNELS:
                decay = tl.load(p_f + index_k, mask=mask_k, other=0.0)
            else:
                reads_f = tl.load(p_f + row)
                decay = tl.load(p_f + 3 * C)

            # Pieces from the last: what is small is added up before what is large.
            b_x = tl.zeros([BLOCK_V, C], dtype=tl.float32)
            for piece in tl.static_range(PK - 1, -1, -1):
                b_k = tl.load(p_reads + piece * H * K + tile_k, mask=mask_tk, other=0.0)
                b_x = piece_dot(b_s, tl.trans(b_k), b_x, PS - piece)
            if not CHANNELS:
                b_x *= reads_f[None, :]
            b_v = tl.load(p_v + tile_v, mask=mask_t[:, None] & mask_v[None, :], other=0.0)
            b_x = transpose_dot(b_v, -b_x)

            b_u = tl.zeros([BLOCK_V, C], dtype=tl.float32)
            for piece in tl.static_range(PS - 1, -1, -1):
                b_solve = tl.load(p_solve + piece * C * C + square)
                b_u = piece_dot(b_x, tl.trans(b_solve), b_u, PS - piece)

            b_o = tl.zeros([BLOCK_V, C], dtype=tl.float32)
            for piece in tl.static_range(PQ - 1, -1, -1):
                b_q = tl.load(p_q + piece * H * K + tile_q, mask=mask_tk, other=0.0)
                b_o = piece_dot(b_s, tl.trans(b_q), b_o, PQ - piece)
            if not CHANNELS:
                b_o *= tl.load(p_f + C + row)[None, :]
            for piece in tl.static_range(PQ - 1, -1, -1):
                b_attend = tl.load(p_attend + piece * C * C + square)
                b_o = piece_dot(b_u, tl.trans(b_attend), b_o, PQ - piece)
            mask_out = mask_v[:, None] & mask_t[None, :]
            tl.store(p_out + tile_out, b_o.to(out.dtype.element_ty), mask=mask_out)

            if not CHANNELS:
                b_u *= tl.load(p_f + 2 * C + row)[None, :]
            update = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
            for piece in tl.static_range(PK - 1, -1, -1):
                if PK > 1 or CHANNELS:
                    b_k = tl.load(p_writes + piece * H * K + tile_k, mask=mask_tk, other=0.0)
                update = piece_dot(b_u, b_k, update, PS - piece)
            b_s = b_s * decay + update

            chunk += HV
        # Read here, so that no register holds the place of the state through the loop.
        slot = tl.load(state_indices + seq).to(tl.int64)
        if slot != 0:
            p_s = state + (slot * HV + head_v) * V * K + index_v[:, None] * K + index_k
            tl.store(p_s, b_s, mask=mask_s)
