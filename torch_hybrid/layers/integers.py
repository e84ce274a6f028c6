"""INT8 and INT4 embeddings with scales, and the dtype of the outputs of such layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.vocabulary import EmbeddingOverRanks, HeadOverRanks
from torch_hybrid.ops.formats.integers import dequantized


class IntegerEmbedding(nn.Module):
    """Embedding with INT8 or INT4 rows, which are dequantized when they are looked up.

    Args:
        weight, scales: weight and scales as of a ``ScaledLinear``, a row for each token.
        dtype: dtype of the outputs.
    """

    def __init__(self, weight: Tensor, scales: Tensor, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [...] int64 -> [..., width]."""
        return dequantized(self.weight[ids], self.scales[ids], self.dtype)


def dtype_of(layer: nn.Module) -> torch.dtype:
    """Return the dtype of the outputs of a linear layer or an embedding."""
    if isinstance(layer, ScaledLinear | IntegerEmbedding):
        return layer.dtype
    if isinstance(layer, EmbeddingOverRanks | HeadOverRanks):
        return dtype_of(layer.part)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.dtype
