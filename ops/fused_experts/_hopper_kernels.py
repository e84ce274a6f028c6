"""Grouped GEMMs of experts on Hopper, in Gluon: warps that load beside warps that multiply.

A tile is up to 192 rows of one expert times 256 rows of its weights. A program takes one tile after
the other. Four of its warps load: rows and weights go into a ring of stages in shared memory, 64
columns at a time. They are stages ahead, in the next tile too. Three groups of four warps multiply
64 rows each, so that a tile costs what it holds. Results are written while the next tile is loaded.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_hybrid.ops.fused_experts._hopper_tiles import (
    GROUP_ROWS,
    NUM_GROUPS,
    find_tile,
    gather,
    load,
    make_ring,
    shared_layout,
    store,
)

HALF = 128  # rows of weights of one product: gate or up, or half of a tile of others
DEPTH = 64  # columns of rows and weights in a stage: 128 bytes, what TMA swizzles

_GROUPS: gl.constexpr = gl.constexpr(NUM_GROUPS)
_STAGES: gl.constexpr = gl.constexpr(4)  # as many as shared memory holds
# Registers of a thread: groups have all but what loading can do with.
_REGISTERS: gl.constexpr = gl.constexpr(160)
_LOADER_REGISTERS: gl.constexpr = gl.constexpr(32)
_M: gl.constexpr = gl.constexpr(GROUP_ROWS)
_N: gl.constexpr = gl.constexpr(HALF)
_K: gl.constexpr = gl.constexpr(DEPTH)


def rows_layout() -> gl.NVMMASharedLayout:
    """Return the layout of 64 rows in shared memory."""
    return shared_layout(16, 2)


def weights_layout() -> gl.NVMMASharedLayout:
    """Return the layout of rows of weights in shared memory, in five dimensions."""
    return shared_layout(16, 5)


_ROWS: gl.constexpr = gl.constexpr(rows_layout())
_WEIGHTS: gl.constexpr = gl.constexpr(weights_layout())
_PRODUCT: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)


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
    ring = make_ring(x.dtype.element_ty, 129, _STAGES, _N, _K, _ROWS, _WEIGHTS)
    tiles = (blocks, num_blocks)
    gl.warp_specialize(
        [
            (_multiply, (hidden, order, tiles, ring, 0, ACTIVATION, E, D, I)),
            (_multiply, (hidden, order, tiles, ring, 1, ACTIVATION, E, D, I)),
            (_multiply, (hidden, order, tiles, ring, 2, ACTIVATION, E, D, I)),
            (gather, (x, order, gate_up, tiles, ring, stride_x, ACTIVATION, TOP_K, E, D, I)),
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
    """Compute outputs of the experts for all pairs [P, D], each at its own number."""
    ring = make_ring(results.dtype.element_ty, 1, _STAGES, _N, _K, _ROWS, _WEIGHTS)
    tiles = (blocks, num_blocks)
    gl.warp_specialize(
        [
            (_multiply, (results, order, tiles, ring, 0, "", E, I, D)),
            (_multiply, (results, order, tiles, ring, 1, "", E, I, D)),
            (_multiply, (results, order, tiles, ring, 2, "", E, I, D)),
            (load, (hidden, down, tiles, ring, E, I, D)),
        ],
        [4, 4, 4],
        [_REGISTERS, _REGISTERS, _LOADER_REGISTERS],
    )


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
    """Multiply 64 rows of each tile, those of one group."""
    COLUMNS: gl.constexpr = _N if ACTIVATION == "silu" else 2 * _N
    rows, halves, full, empty = ring
    step = 0
    wave = 0
    expert, begin, count, column = find_tile(tiles, wave, COLUMNS, E, WIDTH)
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
            store(out, order, a, b, group, begin, count, column, ACTIVATION, WIDTH, False)
        else:  # there are no rows for this group
            for _ in range(0, K, _K):
                mbarrier.wait(full.index(step % _STAGES), (step // _STAGES) & 1)
                mbarrier.arrive(empty.index(step % _STAGES), count=1)
                step += 1
        wave += 1
        expert, begin, count, column = find_tile(tiles, wave, COLUMNS, E, WIDTH)
