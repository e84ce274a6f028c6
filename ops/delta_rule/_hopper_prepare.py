"""The first launch of the rounded form on Hopper, in Gluon: systems of the heads of a key head.

Rows come by TMA and are multiplied where they lie. So registers are left for three programs on a
processor, which wait for each other's latencies. Inverses are of products alone, of numbers
rounded to float16: of blocks of 16 in each warp, as ``_triton_system.py`` says, then of all.
"""

from __future__ import annotations

import math

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_hybrid.ops.delta_rule._hopper import CHUNK, HEAD_DIM_K
from torch_hybrid.ops.triton.hopper import (
    COPIED,
    ROWS,
    add,
    exp2,
    new_barriers,
    products_layout,
    sequence_of_block,
)

_C: gl.constexpr = gl.constexpr(CHUNK)
_K: gl.constexpr = gl.constexpr(HEAD_DIM_K)
_LOG2_E: gl.constexpr = gl.constexpr(math.log2(math.e))
# float32 has nothing between e^-90 and 0, as powers are flushed; sums of more would lose digits.
_NOTHING: gl.constexpr = gl.constexpr(-90.0)
_VECTOR: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_GATES: gl.constexpr = gl.constexpr(
    3
)  # vectors of a head: sums of decays, beta, sums until the end
_SUMMED: gl.constexpr = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
_BLOCKS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))


@gluon.jit(do_not_specialize=["num_seqs", "first_block"])
def hopper_prepare_kernel(
    box_q: tma.tensor_descriptor,
    box_k: tma.tensor_descriptor,
    g: gl.tensor,
    beta: gl.tensor,
    cu_seqlens: gl.tensor,
    keys: gl.tensor,
    solve: gl.tensor,
    attend: gl.tensor,
    factors: gl.tensor,
    scale: gl.tensor,
    num_seqs: gl.tensor,
    first_block: gl.tensor,
    stride_g: gl.tensor,
    stride_beta: gl.tensor,
    H: gl.constexpr,
    HV: gl.constexpr,
    HEADS: gl.constexpr,
) -> None:
    """Prepare one chunk of HEADS value heads of a key head: one program of four warps.

    The grid is chunks by groups of HEADS heads. Rows come by TMA, once, to shared memory.
    """
    L: gl.constexpr = products_layout(_C)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, L)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, L)
    b_k = gl.allocate_shared_memory(gl.bfloat16, [_C, _K], ROWS)
    b_q = gl.allocate_shared_memory(gl.bfloat16, [_C, _K], ROWS)
    b_below = gl.allocate_shared_memory(gl.float16, [_C, _C], ROWS)
    b_solved = gl.allocate_shared_memory(gl.float16, [_C, _C], ROWS)
    b_attend = b_below._reinterpret(gl.bfloat16, [_C, _C], ROWS)
    b_gates = gl.allocate_shared_memory(gl.float32, [_GATES * HEADS, _C], _VECTOR)
    b_norm = gl.allocate_shared_memory(gl.float32, [_C], _VECTOR)
    ready = new_barriers(1, 1).index(0)
    fence_async_shared()

    block = first_block + gl.program_id(0) // (HV // HEADS)
    first_head = gl.program_id(0) % (HV // HEADS) * HEADS
    head_k = first_head // (HV // H)
    seq = sequence_of_block(cu_seqlens, num_seqs, block, _C)
    begin = gl.load(cu_seqlens + seq)
    end = gl.load(cu_seqlens + seq + 1)
    token = begin + (block - begin // _C - seq) * _C
    if token < end:
        left = end - token
        mbarrier.expect(ready, 4 * _C * _K)
        tma.async_copy_global_to_shared(box_q, [token, head_k * _K], ready, b_q)
        tma.async_copy_global_to_shared(box_k, [token, head_k * _K], ready, b_k)
        for head in gl.static_range(HEADS):
            _sum_decays(
                g, beta, token, left, first_head + head, stride_g, stride_beta, b_gates, head
            )

        # Squares of rows are on the diagonals of products, which cost less than the sums.
        row, column = gl.arange(0, _C, OF_ROWS), gl.arange(0, _C, OF_COLUMNS)
        same = row[:, None] == column[None, :]
        zeros = gl.zeros([_C, _C], gl.float32, L)
        mbarrier.wait(ready, 0)
        qq = warpgroup_mma(b_q, b_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        kk = warpgroup_mma(b_k, b_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        qq, kk = warpgroup_mma_wait(0, deps=[qq, kk])
        qk = warpgroup_mma(b_q, b_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        # Rows past the end, of another sequence, are multiplied with nothing but 0.
        norm_q = _norm(gl.sum(gl.where(same, qq, 0.0), 1), row < left) * scale
        norm_k = _norm(gl.sum(gl.where(same, kk, 0.0), 1), row < left)
        b_norm.store(norm_k)
        others = b_norm.load(OF_COLUMNS)[None, :]
        kk = kk * (-norm_k)[:, None] * others
        kk = gl.where((row[:, None] > column[None, :]) & (row < left)[:, None], kk, 0.0)
        minus_kk = kk.to(gl.float16)
        qk = warpgroup_mma_wait(0, deps=[qk]) * norm_q[:, None] * others
        half_qk = gl.where(row[:, None] >= column[None, :], qk, 0.0).to(gl.float16)

        power = _power(norm_k)
        factor_k = gl.where(row < left, norm_k / power, 0.0)
        if first_head % (HV // H) == 0:
            p_keys = keys + (token.to(gl.int64) * H + head_k) * _K
            _store_keys(p_keys, b_k, b_norm, left, H)

        for head in tl.range(0, HEADS, disable_licm=True):
            place = block.to(gl.int64) * HV + first_head + head
            gates = _GATES * head
            total = b_gates.index(gates).load(OF_ROWS)
            until_end = b_gates.index(gates + 2).load(OF_ROWS)
            since_start = exp2(total)
            p_f = factors + place * (4 * _C) + row
            gl.store(p_f, since_start * factor_k)
            gl.store(p_f + _C, since_start * norm_q)
            gl.store(p_f + 2 * _C, exp2(until_end) * factor_k)
            gl.store(p_f + 3 * _C, exp2(total + until_end))
            earlier = b_gates.index(gates).load(OF_COLUMNS)
            decay = exp2(gl.minimum(total[:, None] - earlier[None, :], 0.0))
            b_attend.store((half_qk.to(gl.float32) * decay).to(gl.bfloat16))
            _store(attend, token, left, first_head + head, b_attend, HV)
            b_beta = b_gates.index(gates + 1).load(OF_ROWS)
            minus = (minus_kk.to(gl.float32) * decay * b_beta[:, None]).to(gl.float16)
            solved = _inverse(minus, row[:, None], column[None, :], b_below, b_solved)
            b_beta = b_gates.index(gates + 1).load(OF_COLUMNS)
            b_solved.store((solved * b_beta[None, :]).to(gl.float16))
            _store(solve, token, left, first_head + head, b_solved, HV)


@gluon.jit
def _sum_decays(
    g: gl.tensor,
    beta: gl.tensor,
    token: gl.tensor,
    left: gl.tensor,
    head: gl.tensor,
    stride_g: gl.tensor,
    stride_beta: gl.tensor,
    b_gates: gl.shared_memory_descriptor,
    OWN: gl.constexpr,
) -> None:
    """Leave what a head's gates come to. Rows past the end have beta 0 and decay by nothing."""
    row = gl.arange(0, _C, _SUMMED)
    token = token.to(gl.int64)
    p_g, p_beta = g + token * stride_g + head, beta + token * stride_beta + head
    b_g = gl.load(p_g + row * stride_g, mask=row < left, other=0.0)
    b_beta = gl.load(p_beta + row * stride_beta, mask=row < left, other=0.0)
    total = gl.associative_scan(gl.maximum(b_g, _NOTHING) * _LOG2_E, 0, add)
    last = gl.sum(gl.where(row == _C - 1, total, 0.0), 0)
    b_gates.index(_GATES * OWN).store(total)
    b_gates.index(_GATES * OWN + 1).store(b_beta)
    b_gates.index(_GATES * OWN + 2).store(last - total)


@gluon.jit
def _norm(squares: gl.tensor, mask: gl.tensor) -> gl.tensor:
    """Compute what scales rows to unit length, to float32 precision; 0 where the mask is False."""
    x = squares + 1e-6
    root = gl.rsqrt(x)
    return gl.where(mask, root + root * (0.5 - 0.5 * x * root * root), 0.0)


@gluon.jit
def _power(norm: gl.tensor) -> gl.tensor:
    """Find the power of 2 that brings a row near 1."""
    bits = gl.minimum(norm.to(gl.int32, bitcast=True) & 0x7F800000, 240 << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _store_keys(
    p_keys: gl.tensor,
    b_k: gl.shared_memory_descriptor,
    b_norm: gl.shared_memory_descriptor,
    left: gl.tensor,
    H: gl.constexpr,
) -> None:
    """Write rows of keys, near 1 by powers of 2."""
    row = gl.arange(0, _C, gl.SliceLayout(1, COPIED))
    column = gl.arange(0, _K, gl.SliceLayout(0, COPIED))
    power = _power(b_norm.load(gl.SliceLayout(1, COPIED)))
    rows = (b_k.load(COPIED).to(gl.float32) * power[:, None]).to(gl.float16)
    tile = row[:, None] * (H * _K) + column[None, :]
    gl.store(p_keys + tile, rows, mask=(row < left)[:, None])


@gluon.jit
def _store(
    rows: gl.tensor,
    token: gl.tensor,
    left: gl.tensor,
    head: gl.tensor,
    matrix: gl.shared_memory_descriptor,
    HV: gl.constexpr,
) -> None:
    """Write the rows of a chunk's matrix that are tokens."""
    row = gl.arange(0, _C, gl.SliceLayout(1, COPIED))
    column = gl.arange(0, _C, gl.SliceLayout(0, COPIED))
    p_rows = rows + (token.to(gl.int64) * HV + head) * _C
    tile = row[:, None] * (HV * _C) + column[None, :]
    gl.store(p_rows + tile, matrix.load(COPIED), mask=(row < left)[:, None])


@gluon.jit
def _inverse(
    minus: gl.tensor,
    row: gl.tensor,
    column: gl.tensor,
    b_below: gl.shared_memory_descriptor,
    b_solved: gl.shared_memory_descriptor,
) -> gl.tensor:
    """Compute ``(I - minus)^-1`` of a strictly lower triangular ``minus`` of float16."""
    L: gl.constexpr = products_layout(_C)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    nothing = gl.zeros([_C, _C], gl.float16, L)
    zeros = gl.zeros([_C, _C], gl.float32, L)
    solved = _invert_blocks(minus, row // 16 == column // 16)
    for level in gl.static_range(4, 6):
        b_below.store(gl.where(_is_below(row >> level, column >> level), minus, nothing))
        halves = solved.to(gl.float16)
        b_solved.store(halves)
        fence_async_shared()
        halves = gl.convert_layout(halves, LEFT)
        product = warpgroup_mma(halves, b_below, zeros, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product]).to(gl.float16)
        product = gl.convert_layout(product, LEFT)
        solved = warpgroup_mma(product, b_solved, solved, is_async=True)
        solved = warpgroup_mma_wait(0, deps=[solved])
    return solved


@gluon.jit
def _invert_blocks(minus: gl.tensor, diagonal: gl.tensor) -> gl.tensor:
    """Invert the blocks of 16 on the diagonal, with 0 beside them."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, _BLOCKS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, _BLOCKS, 2)
    own = gl.where(diagonal, minus.to(gl.float32), 0.0).reshape([_C, _C // 16, 16])
    own = gl.convert_layout(gl.sum(own, 1).reshape([_C // 16, 16, 16]), _BLOCKS)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, _BLOCKS)))[None, :][:, :, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, _BLOCKS)))[None, :][:, None, :]
    x = gl.where(row == column, 1.0, gl.where(row // 2 == column // 2, own, 0.0))
    own = own.to(gl.float16)
    nothing = gl.zeros([_C // 16, 16, 16], gl.float16, _BLOCKS)
    zeros = gl.zeros([_C // 16, 16, 16], gl.float32, _BLOCKS)
    for level in gl.static_range(1, 4):
        below = gl.where(_is_below(row >> level, column >> level), own, nothing)
        halves = x.to(gl.float16)
        product = mma_v2(gl.convert_layout(halves, LEFT), gl.convert_layout(below, RIGHT), zeros)
        product = gl.convert_layout(product.to(gl.float16), LEFT)
        x = mma_v2(product, gl.convert_layout(halves, RIGHT), x)
    # Four times side by side.
    x = x.reshape([_C, 16])
    x = gl.join(x, x)
    x = gl.join(x, x).permute((0, 2, 3, 1)).reshape([_C, _C])
    return gl.where(diagonal, gl.convert_layout(x, products_layout(_C)), 0.0)


@gluon.jit
def _is_below(row: gl.tensor, column: gl.tensor) -> gl.tensor:
    """Tell whether blocks are the lower left quarter of one of twice their size."""
    return (row % 2 == 1) & (column == row - 1)
