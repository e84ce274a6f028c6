# mypy: disable-error-code="untyped-decorator"
"""What the first launches of delta rules share in Triton: the system of a chunk.

READMEs of the families derive it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_hybrid.ops.triton.products import exact_dot


@triton.jit
def inverse(
    system: tl.tensor,
    scratch: tl.tensor,
    C: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """``(I + system)^-1`` of a strictly lower triangular ``system [C, C]``.

    Of blocks of 16 on the diagonal by substitution, then each time of twice the size: the inverse
    of [[A, 0], [B, D]] has -D^-1 B A^-1 below the diagonal. No powers of the system are formed:
    with keys that are alike they grow until nothing is left of the inverse.

    Blocks pass from thread to thread through ``scratch``, 16 C numbers that are this program's.
    """
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    diagonal = row // 16 == column // 16
    place = row * 16 + column % 16
    tl.store(scratch + place, system, mask=diagonal)
    tl.debug_barrier()
    _invert_blocks(scratch, C)
    solved = tl.load(scratch + place, mask=diagonal, other=0.0)
    zeros = tl.zeros([C, C], dtype=tl.float32)
    size = 16
    while size < C:
        row_block = row // size
        is_below = (row_block % 2 == 1) & (column // size == row_block - 1)
        product = exact_dot(solved, tl.where(is_below, system, 0.0), zeros, PIECES)
        solved -= exact_dot(product, solved, zeros, PIECES)
        size *= 2
    return solved


@triton.jit
def _invert_blocks(scratch: tl.tensor, C: tl.constexpr) -> None:
    """Put in the place of each strictly lower ``X [16, 16]`` in scratch ``(I + X)^-1``.

    A thread computes one column of one block, all of it in registers.
    """
    index = tl.arange(0, C)
    block = scratch + index // 16 * 256
    column = index % 16
    rows = ((column == 0).to(tl.float32),)
    for i in tl.static_range(1, 16):
        x = (column == i).to(tl.float32)
        for j in tl.static_range(i):
            x -= tl.load(block + (i * 16 + j)) * rows[j]
        rows = rows + (x,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no unpacking)
    tl.debug_barrier()
    for i in tl.static_range(16):
        tl.store(block + (i * 16 + column), rows[i])
    tl.debug_barrier()
