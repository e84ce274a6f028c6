"""Building blocks of the Gluon kernels for Hopper: layouts, barriers, and a block's sequence.

In Gluon a kernel says where each value lies, and which warps do what. It is experimental, and not
interpreted: ``runs_gluon`` (``ops/triton/devices.py``) knows the versions that work.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# What four warps copy at once: 16 rows of 128 bytes.
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# What four warps load of biases at once: 64 keys side by side, and 8 rows in each thread, for which
# what the heads of a token share is worked out once.
BIASES = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [4, 1], [1, 0]))
COPYING_THREADS = gl.constexpr(128)


def rows_layout() -> gl.NVMMASharedLayout:
    """Lay out rows in shared memory as WGMMA reads them: swizzled by 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


ROWS = gl.constexpr(rows_layout())
_LN_2 = gl.constexpr(math.log(2))


@gluon.constexpr_function
def products_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Lay out accumulators of four warps' WGMMAs: 16 rows a warp, ``columns`` an instruction."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def new_barriers(NUM: gl.constexpr, COUNT: gl.constexpr) -> gl.shared_memory_descriptor:
    """Allocate NUM mbarriers, each of which COUNT arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def clear_rows(rows: gl.shared_memory_descriptor, left: gl.tensor, COPIED_BY: gl.constexpr) -> None:
    """Put zeros where rows are of another sequence, or of none: 0 times a NaN is a NaN."""
    b_rows = rows.load(COPIED_BY)
    index = gl.arange(0, rows.shape[0], gl.SliceLayout(1, COPIED_BY))
    rows.store(gl.where((index < left)[:, None], b_rows, gl.zeros_like(b_rows)))
    # Before the barrier that the compiler puts behind a store, or WGMMA may read what was there.
    fence_async_shared()


@gluon.jit
def exp2(x: gl.tensor) -> gl.tensor:
    """Raise 2 to x in one instruction; 0 where that is no normal number."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def add(x: gl.tensor, y: gl.tensor) -> gl.tensor:
    """Add, for scans."""
    return x + y


@gluon.jit
def sequence_of_block(
    cu_seqlens: gl.tensor, num_seqs: gl.tensor, block: gl.tensor, BLOCK: gl.constexpr
) -> gl.tensor:
    """Find the sequence that owns a block of tokens; see ``ops/triton/ragged.py``."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    before = gl.zeros([256], gl.int32, L)
    for base in range(0, num_seqs, 256):
        seq = base + gl.arange(0, 256, L)
        begin = gl.load(cu_seqlens + seq, mask=seq < num_seqs, other=0)
        before += ((seq < num_seqs) & (begin // BLOCK + seq <= block)).to(gl.int32)
    return gl.sum(before, 0) - 1


@gluon.jit
def finish(peak: gl.tensor, total: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """Return the divisor of each row's output, and its natural LSE: -inf without keys."""
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    lse = gl.where(empty, -float("inf"), (peak + gl.log2(total)) * _LN_2)
    return total, lse


@gluon.jit
def tiles_in_pages(
    num_held: gl.tensor,
    position: gl.tensor,
    window: gl.tensor,
    BLOCK_KV: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    REACH: gl.constexpr,
) -> gl.tuple:
    """Count the tiles of keys in pages that queries from ``position`` on read.

    Returns:
        The number of tiles that need masks or biases, and before them of tiles that need neither.
    """
    begin, num_whole = 0, num_held // BLOCK_KV
    if REACH > 0:
        num_whole = gl.minimum(num_held, gl.maximum(0, position - REACH + 1)) // BLOCK_KV
    if HAS_WINDOW:
        begin = gl.maximum(0, gl.minimum(num_held, position - window + 1)) // BLOCK_KV
        num_whole = 0
    return (gl.cdiv(num_held, BLOCK_KV) - begin - num_whole, num_whole)
