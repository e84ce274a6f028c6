# mypy: disable-error-code="untyped-decorator"
"""Grouped GEMMs of experts on Hopper, in Gluon: warps that load beside warps that multiply.

A tile is up to 192 rows of one expert times 256 rows of its weights; a program takes one tile after
the other. Four of its warps load rows and weights, 64 columns at a time, into a ring of stages in
shared memory. They are stages ahead, in the next tile too. Three groups of four warps multiply 64
rows each, so that a tile that is not full costs what it holds. They store while the next tile is
loaded.

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
    warpgroup_mma,
    warpgroup_mma_wait,
)

NUM_GROUPS = 3
GROUP_ROWS = 64
HALF = 128  # rows of weights of one product: gate or up, or half of a tile of others
DEPTH = 64  # columns of rows and weights in a stage: 128 bytes, what TMA swizzles

_GROUPS: gl.constexpr = gl.constexpr(NUM_GROUPS)
_STAGES: gl.constexpr = gl.constexpr(4)  # as many as shared memory holds
# Of each thread: the groups' take all but what loading can do with.
_REGISTERS: gl.constexpr = gl.constexpr(160)
_LOADER_REGISTERS: gl.constexpr = gl.constexpr(32)
_M: gl.constexpr = gl.constexpr(GROUP_ROWS)
_N: gl.constexpr = gl.constexpr(HALF)
_K: gl.constexpr = gl.constexpr(DEPTH)
_X_BYTES: gl.constexpr = gl.constexpr(2 * GROUP_ROWS * DEPTH)
_W_BYTES: gl.constexpr = gl.constexpr(2 * 2 * HALF * DEPTH)


def rows_layout() -> gl.NVMMASharedLayout:
    """Lay out 64 rows of BF16 or FP16 in shared memory, as WGMMA reads them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def weights_layout() -> gl.NVMMASharedLayout:
    """Lay out rows of BF16 or FP16 weights in shared memory, in five dimensions."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)


_ROWS: gl.constexpr = gl.constexpr(rows_layout())
_WEIGHTS: gl.constexpr = gl.constexpr(weights_layout())
_PRODUCT: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
_OUT: gl.constexpr = gl.constexpr(  # of the same registers, columns side by side
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
_GATHER: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit(do_not_specialize=["num_blocks"])
def _hopper_gate_up_kernel(
    x: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    gate_up: tl.tensor,
    hidden: tl.tensor,
    num_blocks: tl.tensor,
    stride_x: tl.tensor,
    ACTIVATION: gl.constexpr,
    TOP_K: gl.constexpr,
    E: gl.constexpr,
    D: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
) -> None:
    """Compute the hidden activations [P, I] of all pairs, in the order of their experts.

    Grid: persistent programs, one an SM. Tile: 192 pairs by 128 columns of gate and of up, or 256
    of up alone. Pipeline: a ring of stages in shared memory; rows are gathered by ``cp.async``,
    weights come by TMA. Registers: two accumulators a multiplying warp.
    """
    # Each of the 128 threads that load arrives, and the one that announces the weights' bytes.
    ring = _make_ring(x.dtype.element_ty, 129)
    tiles = (blocks, num_blocks)
    gl.warp_specialize(
        [
            (_multiply, (hidden, order, tiles, ring, 0, ACTIVATION, E, D, I)),
            (_multiply, (hidden, order, tiles, ring, 1, ACTIVATION, E, D, I)),
            (_multiply, (hidden, order, tiles, ring, 2, ACTIVATION, E, D, I)),
            (_gather, (x, order, gate_up, tiles, ring, stride_x, ACTIVATION, TOP_K, E, D, I)),
        ],
        [4, 4, 4],
        [_REGISTERS, _REGISTERS, _LOADER_REGISTERS],
    )


@gluon.jit(do_not_specialize=["num_blocks"])
def _hopper_down_kernel(
    hidden: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    down: tl.tensor,
    results: tl.tensor,
    num_blocks: tl.tensor,
    E: gl.constexpr,
    D: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
) -> None:
    """Compute the experts' outputs of all pairs [P, D], each at the pair's own number.

    Grid: persistent programs, one an SM. Tile: 192 pairs by 256 columns. Pipeline: a ring of stages
    in shared memory, which TMA fills. Registers: two accumulators a multiplying warp.
    """
    ring = _make_ring(results.dtype.element_ty, 1)
    tiles = (blocks, num_blocks)
    gl.warp_specialize(
        [
            (_multiply, (results, order, tiles, ring, 0, "", E, I, D)),
            (_multiply, (results, order, tiles, ring, 1, "", E, I, D)),
            (_multiply, (results, order, tiles, ring, 2, "", E, I, D)),
            (_load, (hidden, down, tiles, ring, E, I, D)),
        ],
        [4, 4, 4],
        [_REGISTERS, _REGISTERS, _LOADER_REGISTERS],
    )


@gluon.jit
def _make_ring(dtype: gl.constexpr, arrivals: gl.constexpr) -> tl.tuple:
    """Allocate the ring of stages: rows, halves of weights, and barriers of full and of empty
    stages."""
    rows = gl.allocate_shared_memory(dtype, [_STAGES * _GROUPS, _M, _K], _ROWS)
    halves = gl.allocate_shared_memory(dtype, [_STAGES * 2, _N // 32, 4, 4, 2, _K], _WEIGHTS)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=arrivals)
        mbarrier.init(empty.index(stage), count=_GROUPS)
    fence_async_shared()
    return rows, halves, full, empty


@gluon.jit
def _find_tile(
    tiles: tl.tuple, wave: tl.tensor, ACTIVATION: gl.constexpr, E: gl.constexpr, WIDTH: gl.constexpr
) -> tl.tuple:
    """Find the program's tile in a wave: expert, first row, number of rows, and first column.

    The expert is E past the last tile.

    Tiles of a block stand side by side, so that several programs at once read its rows and its
    expert's weights. From wave to wave they move on by a block: where every other block is short,
    no program meets the long ones alone.
    """
    blocks, num_blocks = tiles
    COLUMNS: gl.constexpr = _N if ACTIVATION == "silu" else 2 * _N
    PER_BLOCK: gl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    programs = gl.num_programs(0)
    tile = wave * programs + (gl.program_id(0) + wave * PER_BLOCK) % programs
    block = tile // PER_BLOCK
    expert = gl.load(blocks + 4 * block, mask=block < num_blocks, other=E)
    begin = gl.load(blocks + 4 * block + 1, mask=block < num_blocks, other=0)
    count = gl.load(blocks + 4 * block + 2, mask=block < num_blocks, other=0)
    return expert, begin, count, tile % PER_BLOCK * COLUMNS


@gluon.jit
def _gather(
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
    step = 0
    wave = 0
    expert, begin, count, column = _find_tile(tiles, wave, ACTIVATION, E, I)
    while expert < E:
        upper = expert * ((1 + HAS_GATE) * I) + column
        lower = upper + (I if HAS_GATE else _N)
        index = gl.arange(0, _M, gl.SliceLayout(1, _GATHER))
        first = _offsets(order + begin + index, index < count, stride_x, TOP_K)
        index += _M
        second = _offsets(order + begin + index, index < count, stride_x, TOP_K)
        index += _M
        third = _offsets(order + begin + index, index < count, stride_x, TOP_K)
        for k in range(0, D, _K):
            stage = step % _STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // _STAGES) & 1 ^ 1)
            mbarrier.expect(bar, _W_BYTES)
            _load_weights(gate_up, upper, lower, k, halves, stage, bar)
            _gather_rows(x + k, first, count, rows.index(stage * _GROUPS))
            if count > _M:
                _gather_rows(x + k, second, count - _M, rows.index(stage * _GROUPS + 1))
            if count > 2 * _M:
                _gather_rows(x + k, third, count - 2 * _M, rows.index(stage * _GROUPS + 2))
            async_copy.mbarrier_arrive(bar, increment_count=False)
            step += 1
        wave += 1
        expert, begin, count, column = _find_tile(tiles, wave, ACTIVATION, E, I)


@gluon.jit
def _offsets(
    p_order: tl.tensor, mask: tl.tensor, stride_x: tl.tensor, TOP_K: gl.constexpr
) -> tl.tensor:
    """Compute where 64 gathered rows' columns begin in x: int32, to save registers."""
    token = gl.load(p_order, mask=mask, other=0) // TOP_K
    column = gl.arange(0, _K, gl.SliceLayout(0, _GATHER))
    return (token * stride_x)[:, None] + column[None, :]


@gluon.jit
def _gather_rows(x: tl.tensor, offsets: tl.tensor, count: tl.tensor, rows: tl.tensor) -> None:
    mask = gl.arange(0, _M, gl.SliceLayout(1, _GATHER)) < count
    async_copy.async_copy_global_to_shared(rows, x + offsets, mask=mask[:, None])


@gluon.jit
def _load_weights(
    weights: tl.tensor,
    upper: tl.tensor,
    lower: tl.tensor,
    k: tl.tensor,
    halves: tl.tensor,
    stage: tl.tensor,
    bar: tl.tensor,
) -> None:
    """Load 128 rows of weights from ``upper`` on and 128 from ``lower`` on, by TMA.

    The descriptor's first dimension counts 32 rows.
    """
    half = halves.index(2 * stage)
    tma.async_copy_global_to_shared(weights, [upper // 32, 0, 0, 0, k], bar, half)
    half = halves.index(2 * stage + 1)
    tma.async_copy_global_to_shared(weights, [lower // 32, 0, 0, 0, k], bar, half)


@gluon.jit
def _load(
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
    step = 0
    wave = 0
    expert, begin, count, column = _find_tile(tiles, wave, "", E, D)
    while expert < E:
        upper = expert * D + column
        for k in range(0, I, _K):
            stage = step % _STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // _STAGES) & 1 ^ 1)
            if count > 2 * _M:
                mbarrier.expect(bar, _W_BYTES + 3 * _X_BYTES)
            elif count > _M:
                mbarrier.expect(bar, _W_BYTES + 2 * _X_BYTES)
            else:
                mbarrier.expect(bar, _W_BYTES + _X_BYTES)
            _load_weights(down, upper, upper + _N, k, halves, stage, bar)
            for group in gl.static_range(_GROUPS):
                if count > group * _M:
                    own = rows.index(stage * _GROUPS + group)
                    tma.async_copy_global_to_shared(hidden, [begin + group * _M, k], bar, own)
            step += 1
        wave += 1
        expert, begin, count, column = _find_tile(tiles, wave, "", E, D)


@gluon.jit
def _multiply(
    out: tl.tensor,
    order: tl.tensor,
    tiles: tl.tuple,
    ring: tl.tuple,
    group: gl.constexpr,
    ACTIVATION: gl.constexpr,
    E: gl.constexpr,
    K: gl.constexpr,
    WIDTH: gl.constexpr,
) -> None:
    """Multiply and store one group's 64 rows of each tile."""
    rows, halves, full, empty = ring
    step = 0
    wave = 0
    expert, begin, count, column = _find_tile(tiles, wave, ACTIVATION, E, WIDTH)
    while expert < E:
        if count > group * _M:
            a = gl.zeros([_M, _N], gl.float32, _PRODUCT)
            b = gl.zeros([_M, _N], gl.float32, _PRODUCT)
            for k in range(0, K, _K):
                stage = step % _STAGES
                mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
                if ACTIVATION != "":
                    fence_async_shared()  # gathered rows came another way than TMA's
                x = rows.index(stage * _GROUPS + group)
                upper = halves.index(2 * stage).reshape([_N, _K]).permute((1, 0))
                lower = halves.index(2 * stage + 1).reshape([_N, _K]).permute((1, 0))
                next_a = warpgroup_mma(x, upper, a, use_acc=k > 0, is_async=True)
                next_b = warpgroup_mma(x, lower, b, use_acc=k > 0, is_async=True)
                a, b = warpgroup_mma_wait(2, deps=(next_a, next_b))  # for those of the step before
                mbarrier.arrive(empty.index((step + _STAGES - 1) % _STAGES), count=1, pred=k > 0)
                step += 1
            a, b = warpgroup_mma_wait(0, deps=(a, b))
            mbarrier.arrive(empty.index((step + _STAGES - 1) % _STAGES), count=1)
            _store(out, order, a, b, group, begin, count, column, ACTIVATION, WIDTH)
        else:  # there are no rows for this group
            for _ in range(0, K, _K):
                mbarrier.wait(full.index(step % _STAGES), (step // _STAGES) & 1)
                mbarrier.arrive(empty.index(step % _STAGES), count=1)
                step += 1
        wave += 1
        expert, begin, count, column = _find_tile(tiles, wave, ACTIVATION, E, WIDTH)


@gluon.jit
def _store(
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
) -> None:
    """Write what becomes of both products of 64 rows."""
    index = group * _M + gl.arange(0, _M, gl.SliceLayout(1, _OUT))
    mask = index < count
    row = begin + index
    if ACTIVATION == "silu":
        _store_half(out, b * (a / (1 + gl.exp(-a))), row, mask, column, WIDTH)
    elif ACTIVATION == "relu2":
        a, b = gl.maximum(a, 0.0), gl.maximum(b, 0.0)
        _store_half(out, a * a, row, mask, column, WIDTH)
        _store_half(out, b * b, row, mask, column + _N, WIDTH)
    else:
        pair = gl.load(order + row, mask=mask, other=0)
        _store_half(out, a, pair, mask, column, WIDTH)
        _store_half(out, b, pair, mask, column + _N, WIDTH)


@gluon.jit
def _store_half(
    out: tl.tensor,
    value: tl.tensor,
    row: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    WIDTH: gl.constexpr,
) -> None:
    """Store 64 rows of 128 numbers to the columns of ``out`` [., WIDTH] from ``first`` on."""
    value = value.to(out.dtype.element_ty).reshape([_M, _N // 32, 4, 4, 2])
    value = gl.convert_layout(value.permute((0, 1, 3, 2, 4)).reshape([_M, _N]), _OUT)
    column = first + gl.arange(0, _N, gl.SliceLayout(0, _OUT))
    p_out = out + row.to(gl.int64)[:, None] * WIDTH + column[None, :]
    gl.store(p_out, value, mask=mask[:, None] & (column < WIDTH)[None, :])
