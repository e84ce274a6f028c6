"""The rounded scan on Hopper, in Gluon: a warp that copies, beside groups of warps that walk.

A group of four warps has 64 rows of V of a state in registers. Everything that it multiplies with
comes by TMA, STAGES chunks ahead. Of five products of a chunk three depend on each other; outputs
are written while the state's is on its way. Products and all else take turns at the registers, so
that little runs beside a product for nothing: what counts is how many instructions there are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_hybrid.ops.delta_rule._hopper import CHUNK, HEAD_DIM_K, ROWS_OF_V
from torch_hybrid.ops.triton.hopper import COPIED, ROWS, clear_rows, new_barriers, products_layout

_C: gl.constexpr = gl.constexpr(CHUNK)
_V: gl.constexpr = gl.constexpr(ROWS_OF_V)
_K: gl.constexpr = gl.constexpr(HEAD_DIM_K)
# States are kept in sixteenths: float16 holds 2^16 of them.
_UNIT: gl.constexpr = gl.constexpr(0.0625)
_FACTORS: gl.constexpr = gl.constexpr(4)  # vectors of a chunk
# Registers of a thread of the warps beside the first four, which have what is left.
_WALKING: gl.constexpr = gl.constexpr(224)
_COPYING: gl.constexpr = gl.constexpr(40)
_VECTOR: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_COPIED_VECTOR: gl.constexpr = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
# Arrivals at a stage that is full: each thread's copies, and the bytes that TMA announced.
_ARRIVALS: gl.constexpr = gl.constexpr(33)


@gluon.jit(do_not_specialize=["num_tokens", "num_seqs", "first_block", "last_block"])
def hopper_scan_kernel(
    box_q: tma.tensor_descriptor,
    box_k: tma.tensor_descriptor,
    box_v: tma.tensor_descriptor,
    box_solve: tma.tensor_descriptor,
    box_attend: tma.tensor_descriptor,
    factors: gl.tensor,
    state: gl.tensor,
    carry: gl.tensor,
    cu_seqlens: gl.tensor,
    initial_indices: gl.tensor,
    state_indices: gl.tensor,
    out: gl.tensor,
    num_tokens: gl.tensor,
    num_seqs: gl.tensor,
    first_block: gl.tensor,
    last_block: gl.tensor,
    H: gl.constexpr,
    HV: gl.constexpr,
    V: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Walk a sequence's chunks of a segment with GROUPS times 64 rows of a head's state.

    The grid is sequences by value heads by rows of V. A warp copies by TMA, STAGES chunks ahead;
    each group of four warps has its rows of the state in registers.
    """
    NUM_BLOCKS: gl.constexpr = V // (_V * GROUPS)
    seq = gl.program_id(0) // (NUM_BLOCKS * HV)
    head_v = gl.program_id(0) // NUM_BLOCKS % HV
    first_row = gl.program_id(0) % NUM_BLOCKS * (_V * GROUPS)
    begin = gl.load(cu_seqlens + seq)
    num_new = gl.load(cu_seqlens + seq + 1) - begin
    before = begin // _C + seq
    first = gl.maximum(first_block - before, 0)
    last = gl.minimum(last_block - before, (num_new + _C - 1) // _C)

    b_q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _K], ROWS)
    b_k = gl.allocate_shared_memory(gl.float16, [STAGES, _C, _K], ROWS)
    b_v = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, _C, _V], ROWS)
    b_solve = gl.allocate_shared_memory(gl.float16, [STAGES, _C, _C], ROWS)
    b_attend = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _C], ROWS)
    b_factors = gl.allocate_shared_memory(gl.float32, [STAGES * _FACTORS, _C], _VECTOR)
    b_out = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, _C, _V], ROWS)
    full = new_barriers(STAGES, _ARRIVALS)
    empty = new_barriers(STAGES, GROUPS)
    fence_async_shared()

    boxes = (box_q, box_k, box_v, box_solve, box_attend)
    ring = (b_q, b_k, b_v, b_solve, b_attend, b_factors, full, empty)
    chunks = (first, last, begin, before, num_new)
    pool = (state, carry, initial_indices, state_indices)
    padding = (gl.load(cu_seqlens + num_seqs), num_tokens, num_seqs, first_block)
    place = (seq, head_v, first_row)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_walk, (pool, out, padding, ring, b_out, chunks, place, 0, HV, V, 1, STAGES)),
                (_copy, (boxes, factors, ring, chunks, place, H, HV, V, 1, STAGES)),
            ],
            [1],
            [_COPYING],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (pool, out, padding, ring, b_out, chunks, place, 0, HV, V, 2, STAGES)),
                (_walk, (pool, out, padding, ring, b_out, chunks, place, 1, HV, V, 2, STAGES)),
                (_copy, (boxes, factors, ring, chunks, place, H, HV, V, 2, STAGES)),
            ],
            [4, 1],
            [_WALKING, _COPYING],
        )


@gluon.jit
def _copy(
    boxes: gl.tuple,
    factors: gl.tensor,
    ring: gl.tuple,
    chunks: gl.tuple,
    place: gl.tuple,
    H: gl.constexpr,
    HV: gl.constexpr,
    V: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Fetch each chunk as soon as there is a stage for it."""
    box_q, box_k, box_v, box_solve, box_attend = boxes
    b_q, b_k, b_v, b_solve, b_attend, b_factors, full, empty = ring
    first, last, begin, before, _ = chunks
    _, head_v, first_row = place
    head_k = head_v // (HV // H)
    index = gl.arange(0, _C, _COPIED_VECTOR)
    BYTES: gl.constexpr = 2 * (2 * _C * _K + GROUPS * _C * _V + 2 * _C * _C)
    for chunk in range(first, last):
        step = chunk - first
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
        mbarrier.expect(bar, BYTES)
        token = begin + chunk * _C
        tma.async_copy_global_to_shared(box_k, [token, head_k * _K], bar, b_k.index(stage))
        for group in gl.static_range(GROUPS):
            column = head_v * V + first_row + group * _V
            own = b_v.index(stage * GROUPS + group)
            tma.async_copy_global_to_shared(box_v, [token, column], bar, own)
        tma.async_copy_global_to_shared(box_q, [token, head_k * _K], bar, b_q.index(stage))
        column = head_v * _C
        tma.async_copy_global_to_shared(box_solve, [token, column], bar, b_solve.index(stage))
        tma.async_copy_global_to_shared(box_attend, [token, column], bar, b_attend.index(stage))
        place_f = (before + chunk).to(gl.int64) * HV + head_v
        p_f = factors + place_f * (4 * _C) + index
        for i in gl.static_range(_FACTORS):
            own = b_factors.index(stage * _FACTORS + i)
            async_copy.async_copy_global_to_shared(own, p_f + i * _C)
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _walk(
    pool: gl.tuple,
    out: gl.tensor,
    padding: gl.tuple,
    ring: gl.tuple,
    b_out: gl.shared_memory_descriptor,
    chunks: gl.tuple,
    place: gl.tuple,
    GROUP: gl.constexpr,
    HV: gl.constexpr,
    V: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Walk the chunks with 64 rows of V of the state."""
    L_S: gl.constexpr = products_layout(_K)
    L_C: gl.constexpr = products_layout(_C)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L_C, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, L_C)
    state, carry, initial_indices, state_indices = pool
    b_q, b_k, b_v, b_solve, b_attend, b_factors, full, empty = ring
    first, last, begin, _, num_new = chunks
    seq, head_v, first_row = place
    first_row += GROUP * _V
    _zero_padding(out, padding, seq, head_v, first_row, HV, V)
    if first < last:
        row = first_row + gl.arange(0, _V, gl.SliceLayout(1, L_S))
        tile = row[:, None] * _K + gl.arange(0, _K, gl.SliceLayout(0, L_S))[None, :]
        if first == 0:
            slot = gl.load(initial_indices + seq).to(gl.int64)
            p_s = state + (slot * HV + head_v) * (V * _K) + tile
            b_s = gl.load(p_s, mask=(tile >= 0) & (slot != 0), other=0.0)
        else:
            b_s = gl.load(carry + (seq.to(gl.int64) * HV + head_v) * (V * _K) + tile)
        b_s *= _UNIT
        zeros = gl.zeros([_V, _C], gl.float32, L_C)
        mbarrier.wait(full.index(0), 0)
        for chunk in range(first, last):
            step = chunk - first
            stage = step % STAGES
            keys, values = b_k.index(stage), b_v.index(stage * GROUPS + GROUP)
            vectors = stage * _FACTORS
            left = num_new - chunk * _C
            if left < _C:
                clear_rows(keys, left, COPIED)
                clear_rows(values, left, COPIED)
                clear_rows(b_solve.index(stage), left, COPIED)
            halves = gl.convert_layout(b_s.to(gl.float16), LEFT)
            x = warpgroup_mma(halves, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
            # What waits return comes after them, what they are given before: both are meant.
            rounded = gl.convert_layout(b_s.to(gl.bfloat16), LEFT)
            wanted = values.permute((1, 0)).load(L_C).to(gl.float32) * _UNIT
            reads = b_factors.index(vectors).load(COLUMNS)
            x, halves, rounded, wanted, reads = warpgroup_mma_wait(
                0, deps=[x, halves, rounded, wanted, reads]
            )
            queries = b_q.index(stage).permute((1, 0))
            o = warpgroup_mma(rounded, queries, zeros, use_acc=False, is_async=True)
            x = wanted - x * reads[None, :]
            halves = gl.convert_layout(x.to(gl.float16), LEFT)
            solve = b_solve.index(stage).permute((1, 0))
            u = warpgroup_mma(halves, solve, zeros, use_acc=False, is_async=True)
            b_s *= b_factors.index(vectors + 3).load(gl.SliceLayout(1, L_S))[:, None]
            reads = b_factors.index(vectors + 1).load(COLUMNS)
            writes = b_factors.index(vectors + 2).load(COLUMNS)
            o, rounded, b_s, reads, writes = warpgroup_mma_wait(
                1, deps=[o, rounded, b_s, reads, writes]
            )
            o *= reads[None, :]
            u, halves, o = warpgroup_mma_wait(0, deps=[u, halves, o])
            rounded = gl.convert_layout(u.to(gl.bfloat16), LEFT)
            attend = b_attend.index(stage).permute((1, 0))
            o = warpgroup_mma(rounded, attend, o, is_async=True)
            halves = gl.convert_layout((u * writes[None, :]).to(gl.float16), LEFT)
            b_s = warpgroup_mma(halves, keys, b_s, is_async=True)
            o, rounded = warpgroup_mma_wait(1, deps=[o, rounded])
            _store(out, o, b_out.index(GROUP), begin + chunk * _C, left, head_v, first_row, HV, V)
            step += 1
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=chunk + 1 < last)
            b_s, halves = warpgroup_mma_wait(0, deps=[b_s, halves])
            mbarrier.arrive(empty.index(stage), count=1)
        b_s *= 1.0 / _UNIT
        if last * _C >= num_new:
            slot = gl.load(state_indices + seq).to(gl.int64)
            if slot != 0:
                gl.store(state + (slot * HV + head_v) * (V * _K) + tile, b_s)
        else:
            gl.store(carry + (seq.to(gl.int64) * HV + head_v) * (V * _K) + tile, b_s)


@gluon.jit
def _store(
    out: gl.tensor,
    o: gl.tensor,
    b_out: gl.shared_memory_descriptor,
    token: gl.tensor,
    left: gl.tensor,
    head_v: gl.tensor,
    first_row: gl.tensor,
    HV: gl.constexpr,
    V: gl.constexpr,
) -> None:
    """Write outputs [V, C] of a chunk, of which ``left`` tokens are the sequence's."""
    b_out.permute((1, 0)).store((o * (1.0 / _UNIT)).to(out.dtype.element_ty))
    b_o = b_out.load(COPIED)
    index = gl.arange(0, _C, gl.SliceLayout(1, COPIED))
    column = gl.arange(0, _V, gl.SliceLayout(0, COPIED))
    p_out = out + (token.to(gl.int64) * HV + head_v) * V + first_row
    gl.store(
        p_out + (index[:, None] * (HV * V) + column[None, :]), b_o, mask=(index < left)[:, None]
    )


@gluon.jit
def _zero_padding(
    out: gl.tensor,
    padding: gl.tuple,
    seq: gl.tensor,
    head_v: gl.tensor,
    first_row: gl.tensor,
    HV: gl.constexpr,
    V: gl.constexpr,
) -> None:
    """Put rows past the last sequence to 0; they are dealt out to the sequences in turn."""
    end, num_tokens, num_seqs, first_block = padding
    if first_block == 0:
        index = gl.arange(0, _V, gl.BlockedLayout([1], [32], [4], [0]))
        p_out = out + ((end + seq).to(gl.int64) * HV + head_v) * V + first_row + index
        zeros = gl.zeros_like(index).to(out.dtype.element_ty)
        for _ in range(end + seq, num_tokens, num_seqs):
            gl.store(p_out, zeros)
            p_out += num_seqs.to(gl.int64) * (HV * V)
