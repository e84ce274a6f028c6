"""Implementation "triton": write the new rows, then attend."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.paged_attention._triton_long import LongTiles, attend_long
from torch_hybrid.ops.paged_attention._triton_short import attend_short
from torch_hybrid.ops.paged_attention._triton_write import write_rows
from torch_hybrid.ops.paged_attention.op import Pages
from torch_hybrid.ops.triton.fp8 import readable


def paged_attention_with_lse(x: Pages, *, is_invariant: bool = False) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::paged_attention_with_lse``, and the op without.

    Args:
        x: arguments of the op.
        is_invariant: whether a token has the bits that it has in any call.
    """
    q, kv = x.q, x.kv
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if x.kv_scales is not None:
        kv = readable(kv)
    write_rows(x, kv, out, lse)
    tiles = None if is_invariant else LongTiles.of(x)
    if tiles is None:
        attend_short(x, kv, out, lse, is_invariant=is_invariant)
    else:
        attend_long(x, kv, out, lse, tiles)
    return out, lse
