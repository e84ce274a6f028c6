"""Implementation "flashinfer": FlashInfer finds the k likeliest tokens of rows with a top-k.

The numbers that decide a draw are the caller's, as for every implementation: what a row draws must
not depend on its neighbours. So the rest is the draw of implementation "triton", among the tokens
that are left. FlashInfer's own draws take seeds instead of numbers, and put a row's place in the
batch into its stream; its nucleus ends where a sum in float32 says, which is another token's place
now and then.

Without a top-k there is nothing for it to do: such steps are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.draw_tokens import _triton
from torch_hybrid.ops.draw_tokens.counts import NOT_FINITE


def draw_tokens(
    logits: Tensor, settings: Tensor, *, draws: bool, num_ranked: int, has_wide_top_p: bool
) -> Tensor:
    """Launcher of ``torch_hybrid::draw_tokens``."""
    if not (draws and num_ranked):
        raise ValueError("impl 'flashinfer' draws where some row has a top-k, got none")
    from flashinfer.sampling import top_k_mask_logits

    vocab = logits.shape[1]
    top_k = settings[2]
    ranks = top_k.where(top_k > 0, vocab).clamp(max=vocab).int()
    masked = top_k_mask_logits(logits.contiguous(), ranks)
    settings = settings.clone()
    settings[2] = 0  # all that are left
    tokens = _triton.draw_tokens(masked, settings, draws=True, num_ranked=0, has_wide_top_p=True)
    # A NaN is among the tokens that are masked.
    is_finite = logits.amax(1).abs() < torch.inf
    return tokens.where(is_finite, NOT_FINITE)
