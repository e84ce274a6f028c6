"""Implementation "triton": write the new rows, then attend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.page_bounds import check_page_indices
from torch_hybrid.ops.paged_attention._triton_long import LongTiles, attend_long
from torch_hybrid.ops.paged_attention._triton_short import attend_short
from torch_hybrid.ops.paged_attention._triton_write import write_rows
from torch_hybrid.ops.triton.devices import interpreted
from torch_hybrid.ops.triton.fp8 import readable


def paged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: Tensor | None = None,
    is_invariant: bool = False,
    relative_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::paged_attention_with_lse``, and of the op without.

    ``is_invariant``: a token has the bits that it has in any call.
    """
    if interpreted() and kv.device.type == "cpu":
        check_page_indices(
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=kv.shape[1],
            page_size=kv.shape[2],
            window=window,
        )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if kv_scales is not None:
        kv = readable(kv)
    write_rows(k, v, kv, cu_seqlens, slot_mapping, out, lse, kv_scales)
    index = (cu_seqlens, seq_lens, page_table)
    options: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "kv_scales": kv_scales,
        "relative_bias": relative_bias,
    }
    tiles = None
    if not is_invariant:
        narrow = kv_scales is not None and relative_bias is not None
        sizes = {"num_kv_heads": k.shape[1], "num_seqs": page_table.shape[0]}
        tiles = LongTiles.of(q, **sizes, narrow=narrow)
    if tiles is None:
        attend_short(q, kv, *index, out, lse, **options, is_invariant=is_invariant)
    else:
        attend_long(q, k, v, kv, *index, out, lse, **options, tiles=tiles)
    return out, lse
