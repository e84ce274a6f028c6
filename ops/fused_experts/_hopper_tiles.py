"""Tiles of grouped pairs on Hopper, in Gluon: found, loaded into a ring of stages, and written.

A tile is up to 192 rows of one expert times two halves of rows of its weights. How many rows a half
has, how many columns a stage and how many stages the ring, is what the ring's types say.

Weights arrive by TMA, permuted: of 32 rows, row ``8 q + 2 i + b`` is the ``8 i + 2 q + b``-th in
shared memory. A thread of a product holds columns ``8 i + 2 q + b`` for its own q: permuted so,
they are 8 columns side by side, which it writes at once.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

NUM_GROUPS = 3
GROUP_ROWS = 64
_GROUPS: gl.constexpr = gl.constexpr(NUM_GROUPS)
_M: gl.constexpr = gl.constexpr(GROUP_ROWS)


def shared_layout(bits: int, rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of rows (rank 2) or of rows of weights (rank 5) in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


@gluon.constexpr_function
def _out_layout(half: int) -> gl.DistributedLinearLayout:
    """Return the layout of half a product in the same registers, columns side by side."""
    columns = [[0, column] for column in (32, 64) if column < half]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *columns],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, half],
    )


@gluon.constexpr_function
def _gather_layout(bits: int) -> gl.BlockedLayout:
    """Return the layout of rows that are copied 16 bytes at a time."""
    return gl.BlockedLayout([1, 128 // bits], [4, 8], [4, 1], [1, 0])


@gluon.jit
def make_ring(
    dtype: gl.constexpr,
    arrivals: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
    DEPTH: gl.constexpr,
    ROWS: gl.constexpr,
    WEIGHTS: gl.constexpr,
) -> tl.tuple:
    """Allocate stages of rows and of halves of weights, with barriers of full and empty ones."""
    rows = gl.allocate_shared_memory(dtype, [STAGES * _GROUPS, _M, DEPTH], ROWS)
    halves = gl.allocate_shared_memory(dtype, [STAGES * 2, HALF // 32, 4, 4, 2, DEPTH], WEIGHTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=arrivals)
        mbarrier.init(empty.index(stage), count=_GROUPS)
    fence_async_shared()
    return rows, halves, full, empty


@gluon.jit
def find_tile(
    tiles: tl.tuple, wave: tl.tensor, COLUMNS: gl.constexpr, E: gl.constexpr, WIDTH: gl.constexpr
) -> tl.tuple:
    """Find the program's tile in a wave: its expert, E behind the last; its first row, how many it
    has, and the first of its COLUMNS.

    Tiles of a block stand side by side, so that its rows and its expert's weights are read by
    several programs at once. From wave to wave they move on by a block: where every other block
    is short, no program meets the long ones alone.
    """
    blocks, num_blocks = tiles
    PER_BLOCK: gl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    programs = gl.num_programs(0)
    tile = wave * programs + (gl.program_id(0) + wave * PER_BLOCK) % programs
    block = tile // PER_BLOCK
    expert = gl.load(blocks + 4 * block, mask=block < num_blocks, other=E)
    begin = gl.load(blocks + 4 * block + 1, mask=block < num_blocks, other=0)
    count = gl.load(blocks + 4 * block + 2, mask=block < num_blocks, other=0)
    return expert, begin, count, tile % PER_BLOCK * COLUMNS


@gluon.jit
def gather(
    x: tl.tensor,
    order: tl.tensor,
    gate_up: tl.tensor,
    tiles: tl.tuple,
    ring: tl.tuple,
    stride_x: tl.tensor,
    ACTIVATION: gl.constexpr,
    TOP_K: gl.constexpr,
    E: gl.constexpr,
    D: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
) -> None:
    """Load rows of tokens, wherever they lie, and weights of gate and up."""
    HAS_GATE: gl.constexpr = ACTIVATION == "silu"
    rows, halves, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    K: gl.constexpr = rows.shape[2]
    HALF: gl.constexpr = halves.shape[1] * 32
    COLUMNS: gl.constexpr = HALF if HAS_GATE else 2 * HALF
    BYTES: gl.constexpr = 2 * HALF * K * rows.dtype.primitive_bitwidth // 8
    LAYOUT: gl.constexpr = _gather_layout(rows.dtype.primitive_bitwidth)
    step = 0
    wave = 0
    expert, begin, count, column = find_tile(tiles, wave, COLUMNS, E, I)
    while expert < E:
        upper = expert * ((1 + HAS_GATE) * I) + column
        lower = upper + (I if HAS_GATE else HALF)
        index = gl.arange(0, _M, gl.SliceLayout(1, LAYOUT))
        first = _offsets(order + begin + index, index < count, stride_x, TOP_K, K, LAYOUT)
        index += _M
        second = _offsets(order + begin + index, index < count, stride_x, TOP_K, K, LAYOUT)
        index += _M
        third = _offsets(order + begin + index, index < count, stride_x, TOP_K, K, LAYOUT)
        for k in range(0, D, K):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
            mbarrier.expect(bar, BYTES)
            load_weights(gate_up, upper, lower, k, halves, stage, bar)
            _gather_rows(x + k, first, count, rows.index(stage * _GROUPS))
            if count > _M:
                _gather_rows(x + k, second, count - _M, rows.index(stage * _GROUPS + 1))
            if count > 2 * _M:
                _gather_rows(x + k, third, count - 2 * _M, rows.index(stage * _GROUPS + 2))
            async_copy.mbarrier_arrive(bar, increment_count=False)
            step += 1
        wave += 1
        expert, begin, count, column = find_tile(tiles, wave, COLUMNS, E, I)


@gluon.jit
def _offsets(
    p_order: tl.tensor,
    mask: tl.tensor,
    stride_x: tl.tensor,
    TOP_K: gl.constexpr,
    K: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> tl.tensor:
    """Compute where in x the columns of 64 rows begin: in 32 bits, for want of registers."""
    token = gl.load(p_order, mask=mask, other=0) // TOP_K
    column = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    return (token * stride_x)[:, None] + column[None, :]


@gluon.jit
def _gather_rows(x: tl.tensor, offsets: tl.tensor, count: tl.tensor, rows: tl.tensor) -> None:
    mask = gl.arange(0, _M, gl.SliceLayout(1, offsets.type.layout)) < count
    async_copy.async_copy_global_to_shared(rows, x + offsets, mask=mask[:, None])


@gluon.jit
def load_weights(
    weights: tl.tensor,
    upper: tl.tensor,
    lower: tl.tensor,
    k: tl.tensor,
    halves: tl.tensor,
    stage: tl.tensor,
    bar: tl.tensor,
) -> None:
    """Load half the rows of weights from ``upper`` on and half from ``lower`` on; 32 rows are one
    of the first dimension."""
    half = halves.index(2 * stage)
    tma.async_copy_global_to_shared(weights, [upper // 32, 0, 0, 0, k], bar, half)
    half = halves.index(2 * stage + 1)
    tma.async_copy_global_to_shared(weights, [lower // 32, 0, 0, 0, k], bar, half)


@gluon.jit
def load(
    hidden: tl.tensor,
    down: tl.tensor,
    tiles: tl.tuple,
    ring: tl.tuple,
    E: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
    D: gl.constexpr,
) -> None:
    """Load hidden activations, which lie in order, and weights of down."""
    rows, halves, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    K: gl.constexpr = rows.shape[2]
    HALF: gl.constexpr = halves.shape[1] * 32
    X_BYTES: gl.constexpr = _M * K * rows.dtype.primitive_bitwidth // 8
    W_BYTES: gl.constexpr = 2 * HALF * K * rows.dtype.primitive_bitwidth // 8
    step = 0
    wave = 0
    expert, begin, count, column = find_tile(tiles, wave, 2 * HALF, E, D)
    while expert < E:
        upper = expert * D + column
        for k in range(0, I, K):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
            if count > 2 * _M:
                mbarrier.expect(bar, W_BYTES + 3 * X_BYTES)
            elif count > _M:
                mbarrier.expect(bar, W_BYTES + 2 * X_BYTES)
            else:
                mbarrier.expect(bar, W_BYTES + X_BYTES)
            load_weights(down, upper, upper + HALF, k, halves, stage, bar)
            for group in gl.static_range(_GROUPS):
                if count > group * _M:
                    own = rows.index(stage * _GROUPS + group)
                    tma.async_copy_global_to_shared(hidden, [begin + group * _M, k], bar, own)
            step += 1
        wave += 1
        expert, begin, count, column = find_tile(tiles, wave, 2 * HALF, E, D)


@gluon.jit
def store(
    out: tl.tensor,
    order: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    group: gl.constexpr,
    begin: tl.tensor,
    count: tl.tensor,
    column: tl.tensor,
    ACTIVATION: gl.constexpr,
    WIDTH: gl.constexpr,
    IS_WHOLE: gl.constexpr,
) -> None:
    """Activate both halves of the products of 64 rows, and write them.

    With IS_WHOLE, no tile reaches past the last column.
    """
    HALF: gl.constexpr = a.shape[1]
    LAYOUT: gl.constexpr = _out_layout(HALF)
    index = group * _M + gl.arange(0, _M, gl.SliceLayout(1, LAYOUT))
    mask = index < count
    row = begin + index
    if ACTIVATION == "silu":
        _store_half(out, b * (a / (1 + gl.exp(-a))), row, mask, column, WIDTH, IS_WHOLE)
    elif ACTIVATION == "relu2":
        a, b = gl.maximum(a, 0.0), gl.maximum(b, 0.0)
        _store_half(out, a * a, row, mask, column, WIDTH, IS_WHOLE)
        _store_half(out, b * b, row, mask, column + HALF, WIDTH, IS_WHOLE)
    else:
        pair = gl.load(order + row, mask=mask, other=0)
        _store_half(out, a, pair, mask, column, WIDTH, IS_WHOLE)
        _store_half(out, b, pair, mask, column + HALF, WIDTH, IS_WHOLE)


@gluon.jit
def _store_half(
    out: tl.tensor,
    value: tl.tensor,
    row: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    WIDTH: gl.constexpr,
    IS_WHOLE: gl.constexpr,
) -> None:
    """Write half the columns of 64 rows, to those of ``out`` [., WIDTH] from ``first`` on."""
    HALF: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = _out_layout(HALF)
    value = value.to(out.dtype.element_ty).reshape([_M, HALF // 32, 4, 4, 2])
    value = gl.convert_layout(value.permute((0, 1, 3, 2, 4)).reshape([_M, HALF]), LAYOUT)
    column = first + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    p_out = out + row.to(gl.int64)[:, None] * WIDTH + column[None, :]
    is_there = mask[:, None]
    if not IS_WHOLE:
        is_there = is_there & (column < WIDTH)[None, :]
    gl.store(p_out, value, mask=is_there)
