"""Tokens of sequences through a convolution, as the first part of an op that does more."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.pointwise import silu

ACTIVATIONS = ("none", "silu")
MIN_WIDTH, MAX_WIDTH = (
    2,
    8,
)  # of filters whose taps stay in registers beside all else that such an op does


def check_activation(activation: str) -> None:
    """Raise ValueError for an activation of the convolution that there is not."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}")


def check_width(conv_weight: Tensor) -> None:
    """Raise ValueError for filters [C, W] that no kernel is made for."""
    width = conv_weight.shape[1]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"conv_weight must have width {MIN_WIDTH} to {MAX_WIDTH}, got {width}")


def check_lengths(cu_seqlens: Tensor) -> None:
    """Raise ValueError for offsets on the host of a sequence of several tokens."""
    lengths = cu_seqlens.diff().tolist()
    if any(length > 1 for length in lengths):
        raise ValueError(f"each sequence must have one token or none, got lengths {lengths}")


def check_have_slots(cu_seqlens: Tensor, state_indices: Tensor) -> None:
    """Raise ValueError for a sequence on the host of several tokens whose states are not stored."""
    has_several = cu_seqlens.diff() > 1
    if bool((has_several & (state_indices == 0)).any()):
        raise ValueError(
            f"a sequence of several tokens must have a slot in state_indices, got 0 for lengths "
            f"{cu_seqlens.diff()[state_indices == 0].tolist()}"
        )


def convolve(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Convolve the last token of each window [N, W, C]: return [N, C], in the window's dtype."""
    y = torch.zeros_like(window[:, 0], dtype=torch.float32)
    for x, taps in zip(window.unbind(1), weight.T, strict=True):
        y.addcmul_(x.float(), taps.float())
    if bias is not None:
        y += bias.float()
    return (silu(y) if activation == "silu" else y).to(window.dtype)
