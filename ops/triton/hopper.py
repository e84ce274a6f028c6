# mypy: disable-error-code="untyped-decorator"
"""What Gluon kernels of Hopper share: layouts, barriers, and which sequence a block is of.

Gluon says where each value lies, and which warps do what. It is experimental, and not interpreted:
``runs_gluon`` (``ops/triton/devices.py``) says where it is the one that these are written in.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# What four warps copy at once: 16 rows of 128 bytes.
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# What four warps load of biases at once: 64 keys side by side, and 8 rows in each thread, for which
# what the heads of a token share is worked out once.
BIASES = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [4, 1], [1, 0]))
COPYING_THREADS = gl.constexpr(128)


def rows_layout() -> gl.NVMMASharedLayout:
    """Rows in shared memory, as products take them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


ROWS = gl.constexpr(rows_layout())
_LN_2 = gl.constexpr(math.log(2))


@gluon.constexpr_function
def products_layout(columns: int) -> gl.NVMMADistributedLayout:
    """How the results of four warps' products lie: 16 rows each, so many columns an instruction."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def new_barriers(NUM: gl.constexpr, COUNT: gl.constexpr) -> gl.shared_memory_descriptor:
    """NUM barriers, each of which COUNT arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def sequence_of_block(
    cu_seqlens: gl.tensor, num_seqs: gl.tensor, block: gl.tensor, BLOCK: gl.constexpr
) -> gl.tensor:
    """The sequence that takes the block; see ``ops/triton/ragged.py``."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    before = gl.zeros([256], gl.int32, L)
    for base in range(0, num_seqs, 256):
        seq = base + gl.arange(0, 256, L)
        begin = gl.load(cu_seqlens + seq, mask=seq < num_seqs, other=0)
        before += ((seq < num_seqs) & (begin // BLOCK + seq <= block)).to(gl.int32)
    return gl.sum(before, 0) - 1


@gluon.jit
def finish(peak: gl.tensor, total: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """What results of each row are to be divided by, and the natural LSE, -inf without keys."""
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
    """Of tiles that hold ``num_held`` keys, how many a block of queries from ``position`` on takes
    that hide keys or have biases, and how many before those that do not."""
    begin, num_whole = 0, num_held // BLOCK_KV
    if REACH > 0:
        num_whole = gl.minimum(num_held, gl.maximum(0, position - REACH + 1)) // BLOCK_KV
    if HAS_WINDOW:
        begin = gl.maximum(0, gl.minimum(num_held, position - window + 1)) // BLOCK_KV
        num_whole = 0
    return (gl.cdiv(num_held, BLOCK_KV) - begin - num_whole, num_whole)
