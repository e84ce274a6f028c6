"""The scan of the chunk forms: one program walks the chunks of a sequence with its state.

Keys come as they are, with factors for their rows, or BY_CHANNEL decayed: those that read the state
and those that write it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_rule._hopper import hopper_walk, serves
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
from torch_hybrid.ops.delta_rule.op import DeltaRule, GatedDeltaRule
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import (
    ROUNDED,
    cut,
    load_pieces,
    pieces_dot,
    rounded_dot,
    rows_dot,
    transpose_dot,
    transposed,
)
from torch_hybrid.ops.triton.segments import Launch
from torch_hybrid.ops.triton.state import zero_rows


def scan(x: DeltaRule, prepared: Prepared, walks: ScanSegments) -> tuple[Tensor, Launch]:
    """Allocate the outputs; the launch walks a segment of the chunks of all sequences.

    It fills in the outputs and advances the states.
    """
    queries, keys, v = prepared.queries, prepared.keys, x.v
    solve, attend = prepared.solve, prepared.attend
    _, num_key_pieces, _, head_dim_k = keys.shape
    _, num_v_heads, head_dim_v = v.shape
    num_seqs = x.state_indices.shape[0]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    carry = walks.carry(x)
    if isinstance(x, GatedDeltaRule) and serves(prepared, queries, v):
        return out, hopper_walk(x, prepared, carry, out, is_even=walks.is_even)
    hopper = is_hopper(v.device) and head_dim_k <= 128
    forms = scan_configs(
        v,
        num_v_heads * num_seqs,
        hopper=hopper,
        num_pieces=prepared.num_pieces,
        is_even=walks.is_even,
    )

    def walk(first_block: int, last_block: int) -> None:
        for form in forms:
            blocks_v = triton.cdiv(head_dim_v, form.block_v)
            bind(_scan_kernel, x, prepared, form)[(blocks_v * num_v_heads * num_seqs,)](
                out=out,
                scale=x.scale if x.by_channel else None,
                carry=carry,
                first_block=first_block,
                last_block=last_block,
                # Constants, so that a tile's rows lie at constant distances: fewer registers.
                STRIDE_Q=queries.stride(0),
                STRIDE_K=keys.stride(0),
                STRIDE_V=v.stride(0),
                HV=num_v_heads,
                C=solve.shape[-1],
                PK=num_key_pieces,
                PA=attend.shape[2],
                PS=prepared.num_pieces,
                BLOCK_K=max(16, triton.next_power_of_2(head_dim_k)),
                STAGES=stages_of_factors(prepared.num_pieces),
                num_warps=form.num_warps,
                num_stages=3 if hopper and (x.by_channel or form.block_v <= 64) else 2,
                enable_fp_fusion=True,
            )

    return out, walk


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "first_block", "last_block"])
def _scan_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    writes: tl.tensor | None,
    v: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    factors: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor | None,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    carry: tl.tensor,
    first_block: tl.tensor,
    last_block: tl.tensor,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PK: tl.constexpr,
    PA: tl.constexpr,
    PS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEPS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Walk a sequence's chunks of a segment with BLOCK_V rows of a head's state: one program.

    The grid is sequences by value heads by rows of V; the tile of the state is in registers.
    All that it computes is the left side of its next product and has rows of V, tokens and
    channels are columns: numbers pass from product to product in registers.
    """
    if STEPS != EVERY:  # noqa: SIM102  (one of them is known when it is compiled)
        if is_uneven(cu_seqlens, num_seqs, HV) != (STEPS == UNEVEN):
            return
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    NT: tl.constexpr = max(PS, 1)  # tensors that pieces are in
    UNIT: tl.constexpr = 0.0625 if PS == ROUNDED else 1.0  # float16 holds 2^16 of it
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
    if first_block == 0:
        # The rows past the last sequence are dealt out to the sequences in turn.
        padding = tl.load(cu_seqlens + num_seqs) + seq
        zero_rows(out, padding, num_tokens, num_seqs, head_v, index_v, mask_v, HV, V)

    before = begin // C + seq
    first = tl.maximum(first_block - before, 0) * C
    last = tl.minimum((last_block - before) * C, end - begin)
    if first < last:
        row = tl.arange(0, C)
        tile_q = row[:, None] * STRIDE_Q + index_k
        tile_k = row[:, None] * STRIDE_K + index_k
        tile_v = index_v[None, :] + row[:, None] * STRIDE_V
        tile_out = index_v[:, None] + row[None, :] * (HV * V)
        zeros = tl.zeros([BLOCK_V, C], dtype=tl.float32)
        chunk = (before + first // C).to(tl.int64) * HV + head_v

        tile_s = index_v[:, None] * K + index_k
        is_first = first == 0
        b_s = read_state(
            state, carry, initial_indices, seq, is_first, head_v, tile_s, mask_s, HV, V * K
        )
        b_s *= UNIT
        for done in tl.range(first, last, C, num_stages=STAGES):
            # From the token each time: one number to keep instead of five places.
            token = (begin + done).to(tl.int64)
            # Where addresses are computed decides the machine code: each rule has what was timed.
            if BY_CHANNEL:
                rows = (token * PK * H + head_k) * K + tile_k
                p_k = keys + rows
            else:
                p_q = queries + token * STRIDE_Q + head_k * K + tile_q
                p_k = keys + token * STRIDE_K + head_k * K + tile_k
                p_v = v + token * STRIDE_V + head_v * V
                p_out = out + (token * HV + head_v) * V
            mask_t = done + row < end - begin
            mask_tk = mask_t[:, None] & mask_k
            # Long before they are needed, since they are not fetched ahead.
            if BY_CHANNEL:
                decay = tl.load(factors + chunk * K + index_k, mask=mask_k, other=0.0)
            else:
                p_f = factors + chunk * 4 * C
                reads_f = tl.load(p_f + row)
                queries_f = tl.load(p_f + C + row)
                writes_f = tl.load(p_f + 2 * C + row)
                decay = tl.load(p_f + 3 * C)

            b_k = load_pieces(p_k, H * K, PK, mask_tk)
            b_x = rows_dot(b_s, transposed(b_k), zeros, PS)
            if not BY_CHANNEL:
                b_x *= reads_f[None, :]
            if BY_CHANNEL:
                p_v = v + token * STRIDE_V + head_v * V
            b_v = tl.load(p_v + tile_v, mask=mask_t[:, None] & mask_v[None, :], other=0.0)
            b_x = transpose_dot(b_v, -b_x, UNIT)

            if BY_CHANNEL:
                p_q = queries + (token * H + head_k) * K + tile_q
            b_q = tl.load(p_q, mask=mask_tk, other=0.0)
            if BY_CHANNEL:
                b_o = rounded_dot(b_s, tl.trans(b_q), zeros, PS)
            else:
                b_o = rounded_dot(b_s, tl.trans(b_q), zeros) * queries_f[None, :]

            p_t = solve + (token * HV + head_v) * (NT * C)
            rows_t = p_t + row[:, None] * (HV * NT * C) + row[None, :]
            b_t = load_pieces(rows_t, C, NT, row[:, None] < end - token)
            b_u = rows_dot(b_x, transposed(b_t), zeros, PS)

            p_a = attend + (token * HV + head_v) * (PA * C)
            rows_a = p_a + row[:, None] * (HV * PA * C) + row[None, :]
            b_a = load_pieces(rows_a, C, PA, row[:, None] < end - token)
            if BY_CHANNEL or PS == ROUNDED:
                b_o = rounded_dot(b_u, tl.trans(b_a[0]), b_o, PS)
            elif PA == 1:
                b_o += rounded_dot(b_u, tl.trans(b_a[0]), zeros)
            else:
                b_o = pieces_dot(cut(b_u, PA), transposed(b_a), b_o)
            b_o *= scale * (1.0 / UNIT) if BY_CHANNEL else 1.0 / UNIT
            mask_out = mask_v[:, None] & mask_t[None, :]
            if BY_CHANNEL:
                p_out = out + (token * HV + head_v) * V
            tl.store(p_out + tile_out, b_o.to(out.dtype.element_ty), mask=mask_out)

            if BY_CHANNEL:
                b_k = load_pieces(writes + rows, H * K, PK, mask_tk)
            else:
                b_u *= writes_f[None, :]
            b_s = advance(b_s, decay, b_u, b_k, PS)
            chunk += HV
        b_s *= 1.0 / UNIT
        is_last = last == end - begin
        tile_s = index_v[:, None] * K + index_k
        write_state(
            b_s, state, carry, state_indices, seq, is_last, head_v, tile_s, mask_s, HV, V * K
        )
