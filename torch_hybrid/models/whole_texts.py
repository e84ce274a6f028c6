"""Parts of models of ours in transformers' form, which run whole texts alone, without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.packing import Packing

LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")


def take_whole_texts(attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    """Take the cache out of the options of a model's forward.

    Raises:
        UnsupportedError: there is a cache, or texts are padded.
    """
    pasts = options.pop("cache", None), options.pop("past_key_values", None)
    options["use_cache"] = False
    is_padded = attention_mask is not None and not bool(attention_mask.all())
    if is_padded or any(past is not None for past in pasts):
        raise UnsupportedError(
            "transformers runs whole texts of this model alone, without padding or a cache: "
            "th.adapt(model) is served"
        )


def packing_of_rows(x: Tensor) -> Packing:
    """Make the packing of x [B, T, ...], each row of which is a text."""
    num_texts, length = x.shape[:2]
    offsets = torch.arange(num_texts + 1, dtype=torch.int32, device=x.device) * length
    return Packing(offsets, num_texts, num_tokens=num_texts * length)


def causal_masks(x: Tensor, window: int | None = None) -> dict[str, Tensor | None]:
    """Make what is added to the scores of each type of layer [1, 1, T, T], for x [B, T, dim]."""
    place = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)
    behind, nothing = place[:, None] - place, x.new_zeros(x.shape[1], x.shape[1])
    masks: list[Tensor | None] = [None]
    for most in (x.shape[1], window or x.shape[1]):
        is_seen = (behind >= 0) & (behind < most)
        masks.append(nothing.masked_fill(~is_seen, torch.finfo(x.dtype).min)[None, None])
    return dict(zip(LAYER_TYPES, masks, strict=True))
