"""FlashInfer's kernels of prefill, which families share: with pages, and with dense rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

_NO_ROTATION = 0  # FlashInfer's PosEncodingMode
_CAUSAL, _TOKENS_BEFORE_HEADS = 1, 0  # its MaskMode and TensorLayout
# What all our runs have in common: masks, positions and packed items that they have not.
COMMON: dict[str, Any] = {
    "mask_mode": _CAUSAL,
    "layout": _TOKENS_BEFORE_HEADS,
    "enable_pdl": False,
    "maybe_custom_mask": None,
    "maybe_mask_indptr": None,
    "maybe_alibi_slopes": None,
    "maybe_prefix_len_ptr": None,
    "maybe_token_pos_in_items_ptr": None,
    "maybe_max_item_len_ptr": None,
    "rope_scale": 1.0,
    "rope_theta": 1e4,
    "token_pos_in_items_len": 0,
}


@cache
def kernels(
    form: str, dtype: torch.dtype, head_dim: int, v_head_dim: int, windowed: bool, capped: bool
) -> Any:
    """Get FlashInfer's compiled prefill kernels, which it builds at the first call."""
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(
        form,
        dtype,
        dtype,
        dtype,
        torch.int32,
        head_dim,
        v_head_dim,
        _NO_ROTATION,
        windowed,
        capped,
        False,  # products of queries and keys are summed in float32
    )


def fa3_bytes(values: Sequence[int]) -> int:
    """Compute the size of an fa3 schedule: eight parts, of which the first is as long as the
    last."""
    return values[7] + values[1] - values[0]
