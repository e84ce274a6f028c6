"""Tiles of a recurrent state, what is fetched for them, and zero rows for padding, in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from torch_hybrid.ops.triton.devices import interpreted

_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
# State elements that one warp keeps in registers, 32 a thread: it has 4 KiB of loads in flight.
# With 2048, 64 sequences and more take 1 to 3 % longer, and with 512 up to 20 % (an H200).
_STATE_TILE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The block ``[block_v, block_k]`` of one head's state that a program owns."""

    block_v: int
    block_k: int

    @classmethod
    def of(cls, head_dim_v: int, head_dim_k: int, *, by_channel: bool = False) -> Tile:
        """Fit a warp's tile: all of K, so that no program waits for another, and as many rows of V
        as fit.

        Decays ``by_channel`` of K double the rows: each program computes the decays anew.
        """
        block_k = triton.next_power_of_2(head_dim_k)
        num_rows = (1 + by_channel) * _STATE_TILE // block_k
        block_v = min(triton.next_power_of_2(head_dim_v), max(1, num_rows))
        return cls(block_v=block_v, block_k=block_k)


@triton.jit
def fetch(pointers: tl.tensor) -> None:
    """Bring the lines of memory that hold ``pointers`` to L1, and wait for nothing."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def zero_rows(
    out: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    step: tl.tensor,
    head: tl.tensor,
    index: tl.tensor,
    mask: tl.tensor,
    HV: tl.constexpr,
    V: tl.constexpr,
) -> None:
    """Write 0 to ``out[first:last:step, head, index]``, of ``out [T, HV, V]``."""
    p_out = out + (first.to(tl.int64) * HV + head) * V + index
    zeros = tl.zeros_like(index).to(out.dtype.element_ty)
    for _ in range(first, last, step):
        tl.store(p_out, zeros, mask=mask)
        p_out += step * HV * V
