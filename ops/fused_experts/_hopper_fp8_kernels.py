"""Grouped GEMMs of FP8 experts and FP8 rows on Hopper, in Gluon.

As in ``_hopper_kernels.py``, a tile is up to 192 rows of one expert; four warps load stages ahead,
and three groups of four multiply 64 rows each. Here a tile has 128 rows of weights: 64 of gate and
64 of up, or 128 of down. A stage has 128 columns, which share a scale. Each thread scales and adds
the products of a stage beside the tensor cores' work for the other groups. That takes as many
registers again as the sums.

Tiles of that size load through L2 at its full rate. Where shared memory holds all columns of a
block's hidden activations, they are loaded once for several tiles.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_hybrid.ops.fused_experts._hopper_tiles import (
    GROUP_ROWS,
    NUM_GROUPS,
    find_tile,
    gather,
    load,
    load_weights,
    make_ring,
    shared_layout,
    store,
)

HELD_TILES = 8  # of down, that share the rows which shared memory holds
HALF = 64  # rows of weights of one copy: gate or up, or half of a tile of others
_SHARED = 226 * 1024  # bytes of shared memory, beside those of barriers
DEPTH = 128  # columns of rows and weights in a stage: 128 bytes, what TMA swizzles

_GROUPS: gl.constexpr = gl.constexpr(NUM_GROUPS)
_STAGES: gl.constexpr = gl.constexpr(5)  # as many as shared memory holds
# Of each thread: the groups' take all but what loading can do with.
_REGISTERS: gl.constexpr = gl.constexpr(152)
_LOADER_REGISTERS: gl.constexpr = gl.constexpr(56)
_M: gl.constexpr = gl.constexpr(GROUP_ROWS)
_N: gl.constexpr = gl.constexpr(2 * HALF)
_HALF: gl.constexpr = gl.constexpr(HALF)
_K: gl.constexpr = gl.constexpr(DEPTH)
_X_BYTES: gl.constexpr = gl.constexpr(GROUP_ROWS * DEPTH)
_W_BYTES: gl.constexpr = gl.constexpr(2 * HALF * DEPTH)


def rows_layout() -> gl.NVMMASharedLayout:
    """Return the layout of rows in shared memory."""
    return shared_layout(8, 2)


def held_stages(width: int) -> int:
    """Count the stages of weights that fit beside all columns of rows; 0 if too few."""
    stages = (_SHARED - NUM_GROUPS * GROUP_ROWS * width) // (2 * HALF * DEPTH)
    return min(stages, 6) if stages >= 4 else 0


def weights_layout() -> gl.NVMMASharedLayout:
    """Return the layout of rows of weights in shared memory, in five dimensions."""
    return shared_layout(8, 5)


_ROWS: gl.constexpr = gl.constexpr(rows_layout())
_WEIGHTS: gl.constexpr = gl.constexpr(weights_layout())
_PRODUCT: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)


@gluon.jit(do_not_specialize=["num_blocks", "num_tokens"])
def _hopper_fp8_gate_up_kernel(
    x: tl.tensor,
    units: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    hidden: tl.tensor,
    num_blocks: tl.tensor,
    num_tokens: tl.tensor,
    ACTIVATION: gl.constexpr,
    TOP_K: gl.constexpr,
    E: gl.constexpr,
    D: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
) -> None:
    """Compute the hidden activations [P, I] of all pairs, in the order of their experts.

    Grid: persistent programs, one an SM. Tile: 192 pairs by 64 columns of gate and of up, or 128 of
    up alone. Pipeline: a ring of stages in shared memory; rows are gathered by ``cp.async``,
    weights come by TMA. Registers: a stage's products beside the sums.
    """
    # Each of the 128 threads that load arrives, and the one that announces the weights' bytes.
    ring = make_ring(x.dtype.element_ty, 129, _STAGES, _HALF, _K, _ROWS, _WEIGHTS)
    tiles = (blocks, num_blocks)
    factors = (units, num_tokens, scales)
    gl.warp_specialize(
        [
            (_multiply, (hidden, order, factors, tiles, ring, 0, ACTIVATION, TOP_K, E, D, I)),
            (_multiply, (hidden, order, factors, tiles, ring, 1, ACTIVATION, TOP_K, E, D, I)),
            (_multiply, (hidden, order, factors, tiles, ring, 2, ACTIVATION, TOP_K, E, D, I)),
            (gather, (x, order, gate_up, tiles, ring, D, ACTIVATION, TOP_K, E, D, I)),
        ],
        [4, 4, 4],
        [_REGISTERS, _REGISTERS, _LOADER_REGISTERS],
    )


@gluon.jit(do_not_specialize=["num_blocks", "num_pairs"])
def _hopper_fp8_down_kernel(
    hidden: tl.tensor,
    units: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    results: tl.tensor,
    num_blocks: tl.tensor,
    num_pairs: tl.tensor,
    E: gl.constexpr,
    D: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
) -> None:
    """Compute outputs of the experts for all pairs [P, D], each at its own number."""
    ring = make_ring(hidden.dtype, 1, _STAGES, _HALF, _K, _ROWS, _WEIGHTS)
    tiles = (blocks, num_blocks)
    factors = (units, num_pairs, scales)
    gl.warp_specialize(
        [
            (_multiply, (results, order, factors, tiles, ring, 0, "", 1, E, I, D)),
            (_multiply, (results, order, factors, tiles, ring, 1, "", 1, E, I, D)),
            (_multiply, (results, order, factors, tiles, ring, 2, "", 1, E, I, D)),
            (load, (hidden, down, tiles, ring, E, I, D)),
        ],
        [4, 4, 4],
        [_REGISTERS, _REGISTERS, _LOADER_REGISTERS],
    )


@gluon.jit(do_not_specialize=["num_blocks", "num_pairs"])
def _hopper_fp8_down_held_kernel(
    hidden: tl.tensor,
    units: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    results: tl.tensor,
    num_blocks: tl.tensor,
    num_pairs: tl.tensor,
    E: gl.constexpr,
    D: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
    TILES: gl.constexpr,  # side by side, of the rows that are held
    STAGES: gl.constexpr,  # of weights
) -> None:
    """Compute the outputs like ``_hopper_fp8_down_kernel``, from rows that stay in shared memory.

    All columns of 192 rows are loaded once for TILES tiles of 128 columns; STAGES stages hold
    weights alone.
    """
    rows = gl.allocate_shared_memory(hidden.dtype, [I // _K * _GROUPS, _M, _K], _ROWS)
    halves = gl.allocate_shared_memory(
        hidden.dtype, [STAGES * 2, _HALF // 32, 4, 4, 2, _K], _WEIGHTS
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    held = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=_GROUPS)
    mbarrier.init(held.index(0), count=1)
    mbarrier.init(free.index(0), count=_GROUPS)
    fence_async_shared()
    ring = (rows, halves, full, empty, held, free)
    tiles = (blocks, num_blocks)
    factors = (units, num_pairs, scales)
    gl.warp_specialize(
        [
            (_multiply_held, (results, order, factors, tiles, ring, 0, E, I, D, TILES, STAGES)),
            (_multiply_held, (results, order, factors, tiles, ring, 1, E, I, D, TILES, STAGES)),
            (_multiply_held, (results, order, factors, tiles, ring, 2, E, I, D, TILES, STAGES)),
            (_load_held, (hidden, down, tiles, ring, E, I, D, TILES, STAGES)),
        ],
        [4, 4, 4],
        [_REGISTERS, _REGISTERS, _LOADER_REGISTERS],
    )


@gluon.jit
def _load_held(
    hidden: tl.tensor,
    down: tl.tensor,
    tiles: tl.tuple,
    ring: tl.tuple,
    E: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
    D: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Load all columns of some rows, and the weights of TILES tiles for them: the first while the
    rows before are multiplied."""
    WIDE: gl.constexpr = I // _K
    AHEAD: gl.constexpr = min(WIDE, STAGES) - 1
    rows, halves, full, empty, held, free = ring
    held, free = held.index(0), free.index(0)
    step = 0
    wave = 0
    expert, begin, count, column = find_tile(tiles, wave, TILES * _N, E, D)
    while expert < E:
        for tile in range(TILES):
            upper = expert * D + column + tile * _N
            for block in range(WIDE):
                stage = step % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
                mbarrier.expect(bar, _W_BYTES)
                load_weights(down, upper, upper + _HALF, block * _K, halves, stage, bar)
                step += 1
                if tile * WIDE + block == AHEAD:
                    mbarrier.wait(free, wave & 1 ^ 1)
                    if count > 2 * _M:
                        mbarrier.expect(held, 3 * WIDE * _X_BYTES)
                    elif count > _M:
                        mbarrier.expect(held, 2 * WIDE * _X_BYTES)
                    else:
                        mbarrier.expect(held, WIDE * _X_BYTES)
                    for group in gl.static_range(_GROUPS):
                        if count > group * _M:
                            for wide in gl.static_range(WIDE):
                                own = rows.index(wide * _GROUPS + group)
                                place = [begin + group * _M, wide * _K]
                                tma.async_copy_global_to_shared(hidden, place, held, own)
        wave += 1
        expert, begin, count, column = find_tile(tiles, wave, TILES * _N, E, D)


@gluon.jit
def _multiply_held(
    out: tl.tensor,
    order: tl.tensor,
    factors: tl.tuple,
    tiles: tl.tuple,
    ring: tl.tuple,
    group: gl.constexpr,
    E: gl.constexpr,
    I: gl.constexpr,  # noqa: E741 (the letter of the formulas)
    D: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Multiply and store one group's 64 held rows, in TILES tiles."""
    WIDE: gl.constexpr = I // _K
    units, num_units, scales = factors
    rows, halves, full, empty, held, free = ring
    held, free = held.index(0), free.index(0)
    weights = halves._reinterpret(halves.dtype, [STAGES, _N, _K], _ROWS)
    zeros = gl.zeros([_M, _N], gl.float32, _PRODUCT)
    step = 0
    wave = 0
    expert, begin, count, column = find_tile(tiles, wave, TILES * _N, E, D)
    while expert < E:
        mbarrier.wait(held, wave & 1)
        if count > group * _M:
            for tile in range(TILES):
                a, b = _halves(zeros)
                index = group * _M + gl.arange(0, _M, gl.SliceLayout(1, a.type.layout))
                first = column + tile * _N
                p_scale = scales + (expert * (D // _K) + first // _K) * WIDE
                for block in range(WIDE):
                    p_unit = units + block * num_units + begin + index
                    factor = gl.load(p_unit, mask=index < count, other=0.0)
                    factor *= gl.load(p_scale + block)
                    stage = step % STAGES
                    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                    x = rows.index(block * _GROUPS + group)
                    w = weights.index(stage).permute((1, 0))
                    part = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, deps=(part,))
                    mbarrier.arrive(empty.index(stage), count=1)
                    part_a, part_b = _halves(part)
                    a += part_a * factor[:, None]
                    b += part_b * factor[:, None]
                    step += 1
                mbarrier.arrive(free, count=1, pred=tile == TILES - 1)
                store(out, order, a, b, group, begin, count, first, "", D, True)
        else:  # there are no rows for this group
            for _ in range(TILES * WIDE):
                mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(step % STAGES), count=1)
                step += 1
            mbarrier.arrive(free, count=1)
        wave += 1
        expert, begin, count, column = find_tile(tiles, wave, TILES * _N, E, D)


@gluon.jit
def _multiply(
    out: tl.tensor,
    order: tl.tensor,
    factors: tl.tuple,
    tiles: tl.tuple,
    ring: tl.tuple,
    group: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TOP_K: gl.constexpr,
    E: gl.constexpr,
    K: gl.constexpr,
    WIDTH: gl.constexpr,
) -> None:
    """Multiply and store one group's 64 rows of each tile."""
    HAS_GATE: gl.constexpr = ACTIVATION == "silu"
    COLUMNS: gl.constexpr = _HALF if HAS_GATE else _N
    HIGH: gl.constexpr = (1 + HAS_GATE) * (WIDTH // _K)
    WIDE: gl.constexpr = K // _K
    units, num_units, scales = factors
    rows, halves, full, empty = ring
    weights = halves._reinterpret(halves.dtype, [_STAGES, _N, _K], _ROWS)
    zeros = gl.zeros([_M, _N], gl.float32, _PRODUCT)
    step = 0
    wave = 0
    expert, begin, count, column = find_tile(tiles, wave, COLUMNS, E, WIDTH)
    while expert < E:
        if count > group * _M:
            a, b = _halves(zeros)
            index = group * _M + gl.arange(0, _M, gl.SliceLayout(1, a.type.layout))
            row = begin + index
            if ACTIVATION != "":  # units are the tokens'
                row = gl.load(order + row, mask=index < count, other=0) // TOP_K
            p_scale = scales + (expert * HIGH + column // _K) * WIDE
            for block in range(WIDE):
                unit = gl.load(units + block * num_units + row, mask=index < count, other=0.0)
                upper = gl.load(p_scale + block)
                lower = gl.load(p_scale + block + (HIGH // 2 * WIDE if HAS_GATE else 0))
                stage = step % _STAGES
                mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
                if ACTIVATION != "":
                    fence_async_shared()  # gathered rows came another way than TMA's
                x = rows.index(stage * _GROUPS + group)
                part = warpgroup_mma(
                    x, weights.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage), count=1)
                part_a, part_b = _halves(part)
                a += part_a * (unit * upper)[:, None]
                b += part_b * (unit * lower)[:, None]
                step += 1
            store(out, order, a, b, group, begin, count, column, ACTIVATION, WIDTH, True)
        else:  # there are no rows for this group
            for _ in range(WIDE):
                mbarrier.wait(full.index(step % _STAGES), (step // _STAGES) & 1)
                mbarrier.arrive(empty.index(step % _STAGES), count=1)
                step += 1
        wave += 1
        expert, begin, count, column = find_tile(tiles, wave, COLUMNS, E, WIDTH)


@gluon.jit
def _halves(products: tl.tensor) -> tl.tuple:
    """Split the first 64 columns from the others, each in the registers where they are."""
    return gl.split(products.reshape([_M, 2, _HALF]).permute((0, 2, 1)))
