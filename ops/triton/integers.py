# mypy: disable-error-code="untyped-decorator"
"""Numbers of 4 bits in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_and_zero(
    pointer: tl.tensor, mask: tl.tensor, ZEROS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The scales of groups, and what is stored of numbers that are worth nothing: with ZEROS it
    stands beside the scale, else it is 8."""
    scale = tl.load(pointer, mask=mask, other=0.0)
    if ZEROS:
        zero = tl.load(pointer + 1, mask=mask, other=0.0)
    else:
        zero = tl.full(scale.shape, 8.0, dtype=tl.float32)
    return scale, zero
