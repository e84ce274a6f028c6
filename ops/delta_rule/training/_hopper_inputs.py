# mypy: disable-error-code="untyped-decorator"
"""The last launch of the gated rule's backward on Hopper, in Gluon: gradients of chunks' inputs.

A warp copies tiles by TMA, a head ahead, beside eight that multiply them where they lie. Rows are
scaled by decays after products, not before, so that no tile passes through registers. Eight
sequences of 1024 tokens, 16/32 heads of 128, take 267 us on an H200, of which 152 are what their
bytes take; ``_triton_gated._inputs_kernel`` takes 526. Rows of unit length add 40 us, and 49 in
launches of their own.
"""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_hybrid.ops.delta_rule._hopper import CHUNK, HEAD_DIM_K
from torch_hybrid.ops.triton.hopper import ROWS, add, clear_rows, exp2, new_barriers

_C: gl.constexpr = gl.constexpr(CHUNK)
_D: gl.constexpr = gl.constexpr(HEAD_DIM_K)  # dims of keys, and of values
_STAGES: gl.constexpr = gl.constexpr(2)  # heads whose rows are held
_PART: gl.constexpr = gl.constexpr(16)  # rows of states that are in registers at once
_TILE: gl.constexpr = gl.constexpr(2 * CHUNK * HEAD_DIM_K)  # bytes of rows of a chunk
_COPYING: gl.constexpr = gl.constexpr(24)  # registers of a thread of the warp that copies
# Accumulators of eight warps: two groups of four share the columns.
_WIDE: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
_SQUARE: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_COPIED: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
_VECTOR: gl.constexpr = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))  # whole in each warp


@gluon.jit(do_not_specialize=["num_chunks", "num_tokens"])
def hopper_inputs_kernel(
    box_q: tma.tensor_descriptor,
    box_k: tma.tensor_descriptor,
    box_do: tma.tensor_descriptor,
    box_e: tma.tensor_descriptor,
    box_de: tma.tensor_descriptor,
    box_s: tma.tensor_descriptor,
    box_ds: tma.tensor_descriptor,
    factors: gl.tensor,
    beta: gl.tensor,
    places: gl.tensor,
    dq: gl.tensor,
    dk: gl.tensor,
    dg: gl.tensor,
    dbeta: gl.tensor,
    factors_q: gl.tensor | None,
    factors_k: gl.tensor | None,
    scale: gl.tensor,
    num_chunks: gl.tensor,
    num_tokens: gl.tensor,
    stride_beta: gl.tensor,
    H: gl.constexpr,
    HV: gl.constexpr,
) -> None:
    """Compute the gradients of chunks' inputs by key heads: a program takes every so many-th.

    ``factors`` and ``places`` are those of ``_triton_gated._systems_kernel``. Sums for q, for keys
    that read and for keys that write stay in registers over the value heads of a key head.
    """
    b_q = gl.allocate_shared_memory(gl.bfloat16, [_C, _D], ROWS)
    b_k = gl.allocate_shared_memory(gl.bfloat16, [_C, _D], ROWS)
    b_do = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _C, _D], ROWS)
    b_e = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _C, _D], ROWS)
    b_de = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _C, _D], ROWS)
    b_s = gl.allocate_shared_memory(gl.bfloat16, [_D, _D], ROWS)
    b_ds = gl.allocate_shared_memory(gl.bfloat16, [_D, _D], ROWS)
    b_attend = gl.allocate_shared_memory(gl.bfloat16, [_C, _C], ROWS)
    b_system = gl.allocate_shared_memory(gl.bfloat16, [_C, _C], ROWS)
    # Of q and k, of the rows of a head, of the state before a chunk and of that behind it.
    full = (new_barriers(1, 1), new_barriers(_STAGES, 1), new_barriers(1, 1), new_barriers(1, 1))
    empty = (new_barriers(1, 1), new_barriers(_STAGES, 1), new_barriers(1, 1), new_barriers(1, 1))
    fence_async_shared()
    boxes = (box_q, box_k, box_do, box_e, box_de, box_s, box_ds)
    tiles = (b_q, b_k, b_do, b_e, b_de, b_s, b_ds)
    squares = (b_attend, b_system)
    gates = (factors, beta, num_tokens, stride_beta)
    grads = (dq, dk, dg, dbeta, factors_q, factors_k)
    gl.warp_specialize(
        [
            (
                _multiply,
                (tiles, squares, full, empty, gates, places, grads, scale, num_chunks, H, HV),
            ),
            (_copy, (boxes, tiles, full, empty, places, num_chunks, H, HV)),
        ],
        [1],
        [_COPYING],
    )


@gluon.jit
def _copy(
    boxes: gl.tuple,
    tiles: gl.tuple,
    full: gl.tuple,
    empty: gl.tuple,
    places: gl.tensor,
    num_chunks: gl.tensor,
    H: gl.constexpr,
    HV: gl.constexpr,
) -> None:
    """Fetch what each head needs as soon as there is room for it."""
    box_q, box_k, box_do, box_e, box_de, box_s, box_ds = boxes
    b_q, b_k, b_do, b_e, b_de, b_s, b_ds = tiles
    num_done, num_heads = 0, 0
    for item in range(gl.program_id(0), num_chunks * H, gl.num_programs(0)):
        p_place, head_k = places + 4 * (item // H), item % H
        token = gl.load(p_place)
        if gl.load(p_place + 1) > 0:
            before, behind = gl.load(p_place + 2), gl.load(p_place + 3)
            for head in range(head_k * (HV // H), (head_k + 1) * (HV // H)):
                stage = num_heads % _STAGES
                bar = full[1].index(stage)
                mbarrier.wait(empty[1].index(stage), (num_heads // _STAGES) & 1 ^ 1)
                mbarrier.expect(bar, 3 * _TILE)
                column = head * _D
                tma.async_copy_global_to_shared(box_do, [token, column], bar, b_do.index(stage))
                tma.async_copy_global_to_shared(box_e, [token, column], bar, b_e.index(stage))
                tma.async_copy_global_to_shared(box_de, [token, column], bar, b_de.index(stage))
                _copy_state(box_s, before * HV + head, b_s, full[2], empty[2], num_heads)
                _copy_state(box_ds, behind * HV + head, b_ds, full[3], empty[3], num_heads)
                if head % (HV // H) == 0:
                    bar = full[0].index(0)
                    mbarrier.wait(empty[0].index(0), num_done & 1 ^ 1)
                    mbarrier.expect(bar, 2 * _TILE)
                    tma.async_copy_global_to_shared(box_q, [token, head_k * _D], bar, b_q)
                    tma.async_copy_global_to_shared(box_k, [token, head_k * _D], bar, b_k)
                num_heads += 1
            num_done += 1


@gluon.jit
def _copy_state(
    box: tma.tensor_descriptor,
    place: gl.tensor,
    state: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    empty: gl.shared_memory_descriptor,
    num_heads: gl.tensor,
) -> None:
    """Fetch a state; TMA has zeros where rows lie before the first."""
    bar = full.index(0)
    mbarrier.wait(empty.index(0), num_heads & 1 ^ 1)
    mbarrier.expect(bar, 2 * _TILE)
    tma.async_copy_global_to_shared(box, [place * _D, 0], bar, state)


@gluon.jit
def _multiply(
    tiles: gl.tuple,
    squares: gl.tuple,
    full: gl.tuple,
    empty: gl.tuple,
    gates: gl.tuple,
    places: gl.tensor,
    grads: gl.tuple,
    scale: gl.tensor,
    num_chunks: gl.tensor,
    H: gl.constexpr,
    HV: gl.constexpr,
) -> None:
    """Multiply tiles, and write gradients."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, _SQUARE)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, _SQUARE)
    b_q, b_k, b_do, b_e, b_de, b_s, b_ds = tiles
    b_attend, b_system = squares
    dq, dk, dg, dbeta, factors_q, factors_k = grads
    zeros = gl.zeros([_C, _D], gl.float32, _WIDE)
    square = gl.zeros([_C, _C], gl.float32, _SQUARE)
    wide = gl.arange(0, _C, gl.SliceLayout(1, _WIDE))
    row, column = gl.arange(0, _C, OF_ROWS), gl.arange(0, _C, OF_COLUMNS)
    index = gl.arange(0, _C, _VECTOR)
    num_done, num_heads = 0, 0
    # Masks and addresses would not all fit into registers if they were made before the loops.
    for item in tl.range(gl.program_id(0), num_chunks * H, gl.num_programs(0), disable_licm=True):
        p_place, head_k = places + 4 * (item // H), item % H
        token, left = gl.load(p_place), gl.load(p_place + 1)
        if left > 0:
            by_q, by_read, by_write = zeros, zeros, zeros
            summed = gl.zeros([_C], gl.float32, _VECTOR)
            for group in tl.range(0, HV // H, disable_licm=True):
                head = head_k * (HV // H) + group
                since = _factor(gates, 0, token, left, head, wide, HV)
                until = _factor(gates, 1, token, left, head, wide, HV)
                b_beta = _beta(gates, token, left, head, wide)
                last = (token + gl.minimum(left, _C) - 1).to(gl.int64)
                whole = gl.load(gates[0] + last * HV + head)
                stage = num_heads % _STAGES
                t_do, t_e, t_de = b_do.index(stage), b_e.index(stage), b_de.index(stage)
                mbarrier.wait(full[1].index(stage), (num_heads // _STAGES) & 1)
                if left < _C:
                    clear_rows(t_do, left, _COPIED)
                    clear_rows(t_e, left, _COPIED)
                    clear_rows(t_de, left, _COPIED)
                t_u = t_e.permute((1, 0))
                attend = warpgroup_mma(t_do, t_u, square, use_acc=False, is_async=True)
                system = warpgroup_mma(t_de, t_u, square, use_acc=False, is_async=True)
                mbarrier.wait(full[2].index(0), num_heads & 1)
                of_q = warpgroup_mma(t_do, b_s, zeros, use_acc=False, is_async=True)
                of_read = warpgroup_mma(t_de, b_s, zeros, use_acc=False, is_async=True)
                attend, system, of_q, of_read = warpgroup_mma_wait(
                    0, deps=[attend, system, of_q, of_read]
                )
                by_q += of_q * (since * scale)[:, None]
                by_read += of_read * (-b_beta * since)[:, None]
                mbarrier.wait(full[3].index(0), num_heads & 1)
                of_write = warpgroup_mma(t_e, b_ds, zeros, use_acc=False, is_async=True)
                d_whole = _inner(b_s, b_ds)
                mbarrier.arrive(empty[2].index(0), count=1)

                # What a row's gradient of e has of its own e is beta's gradient.
                p_beta = (
                    dbeta + (token + row).to(gl.int64)[:, None] * HV + head + 0 * column[None, :]
                )
                own = (row[:, None] == column[None, :]) & (row < left)[:, None]
                gl.store(p_beta, system, mask=own)
                # Rows past the end have the sum of the last: no decay overflows.
                last_row = gl.minimum(row, left - 1)
                totals = _factor(gates, 2, token, left, head, last_row, HV)[:, None]
                last_row = gl.minimum(column, left - 1)
                totals -= _factor(gates, 2, token, left, head, last_row, HV)[None, :]
                is_past = row[:, None] >= column[None, :]
                decay = exp2(gl.where(is_past, totals, -float("inf")))
                decay *= _beta(gates, token, left, head, column)[None, :]
                b_attend.store((attend * decay * scale).to(gl.bfloat16))
                system = gl.where(row[:, None] > column[None, :], system * decay, 0.0)
                system *= -_beta(gates, token, left, head, row)[:, None]
                b_system.store(system.to(gl.bfloat16))
                fence_async_shared()

                of_write = warpgroup_mma_wait(0, deps=[of_write]) * (b_beta * until)[:, None]
                mbarrier.arrive(empty[3].index(0), count=1)
                mbarrier.arrive(empty[1].index(stage), count=1)
                if group == 0:
                    mbarrier.wait(full[0].index(0), num_done & 1)
                    if left < _C:
                        clear_rows(b_q, left, _COPIED)
                        clear_rows(b_k, left, _COPIED)
                by_q = warpgroup_mma(b_attend, b_k, by_q, is_async=True)
                by_read = warpgroup_mma(b_system, b_k, by_read, is_async=True)
                by_write += of_write
                written = of_write * b_k.load(_WIDE).to(gl.float32)
                at_end = gl.sum(written.reshape([_C * _D]), 0) + whole * d_whole
                by_write = warpgroup_mma(b_attend.permute((1, 0)), b_q, by_write, is_async=True)
                by_write = warpgroup_mma(b_system.permute((1, 0)), b_k, by_write, is_async=True)
                by_q, by_read, by_write = warpgroup_mma_wait(0, deps=[by_q, by_read, by_write])
                sums = by_q * b_q.load(_WIDE).to(gl.float32)
                sums += (by_read - by_write) * b_k.load(_WIDE).to(gl.float32)
                sums = gl.convert_layout(gl.sum(sums, 1), _VECTOR)
                # A head's share is what sums grew by. The gradient of a decay is the sum over the
                # rows from its own on.
                d_total = sums - summed + gl.where(index == _C - 1, at_end, 0.0)
                summed = sums
                d_g = gl.associative_scan(d_total, 0, add, reverse=True)
                gl.store(dg + (token + index).to(gl.int64) * HV + head, d_g, mask=index < left)
                num_heads += 1
            by_q = _before_unit(by_q, b_q, factors_q, token, left, head_k, H)
            by_k = _before_unit(by_read + by_write, b_k, factors_k, token, left, head_k, H)
            b_q.store(by_q.to(gl.bfloat16))
            b_k.store(by_k.to(gl.bfloat16))
            _store_rows(dq, b_q, token, left, head_k, H)
            _store_rows(dk, b_k, token, left, head_k, H)
            fence_async_shared()
            mbarrier.arrive(empty[0].index(0), count=1)
            num_done += 1


@gluon.jit
def _factor(
    gates: gl.tuple,
    WHICH: gl.constexpr,
    token: gl.tensor,
    left: gl.tensor,
    head: gl.tensor,
    row: gl.tensor,
    HV: gl.constexpr,
) -> gl.tensor:
    """Load a factor of a chunk's rows; 0 past the end of the sequence."""
    factors, _, num_tokens, _ = gates
    place = WHICH * num_tokens.to(gl.int64) + token + row
    return gl.load(factors + place * HV + head, mask=row < left, other=0.0)


@gluon.jit
def _beta(
    gates: gl.tuple, token: gl.tensor, left: gl.tensor, head: gl.tensor, row: gl.tensor
) -> gl.tensor:
    _, beta, _, stride = gates
    p_beta = beta + (token + row).to(gl.int64) * stride + head
    return gl.load(p_beta, mask=row < left, other=0.0)


@gluon.jit
def _inner(x: gl.shared_memory_descriptor, y: gl.shared_memory_descriptor) -> gl.tensor:
    """Compute the inner product of two states."""
    total = gl.zeros([_PART, _D], gl.float32, _COPIED)
    for part in gl.static_range(_D // _PART):
        product = x.slice(part * _PART, _PART).load(_COPIED).to(gl.float32)
        total += product * y.slice(part * _PART, _PART).load(_COPIED).to(gl.float32)
    return gl.sum(total.reshape([_PART * _D]), 0)


@gluon.jit
def _before_unit(
    grad: gl.tensor,
    unit: gl.shared_memory_descriptor,
    factors: gl.tensor | None,
    token: gl.tensor,
    left: gl.tensor,
    head: gl.tensor,
    HEADS: gl.constexpr,
) -> gl.tensor:
    """Take a gradient of rows of unit length to that of the rows before, if there are factors."""
    if factors is not None:
        b_unit = unit.load(_WIDE).to(gl.float32)
        grad -= b_unit * gl.sum(grad * b_unit, 1)[:, None]
        row = gl.arange(0, _C, gl.SliceLayout(1, _WIDE))
        p_factors = factors + (token + row).to(gl.int64) * HEADS + head
        grad *= gl.load(p_factors, mask=row < left, other=0.0)[:, None]
    return grad


@gluon.jit
def _store_rows(
    out: gl.tensor,
    rows: gl.shared_memory_descriptor,
    token: gl.tensor,
    left: gl.tensor,
    head: gl.tensor,
    HEADS: gl.constexpr,
) -> None:
    index = gl.arange(0, _C, gl.SliceLayout(1, _COPIED))
    column = gl.arange(0, _D, gl.SliceLayout(0, _COPIED))
    p_out = out + (token.to(gl.int64) * HEADS + head) * _D
    tile = index[:, None] * (HEADS * _D) + column[None, :]
    gl.store(p_out + tile, rows.load(_COPIED), mask=(index < left)[:, None])
