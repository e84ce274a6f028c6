"""Embeddings of integers of 8 or 4 bits with scales, and what layers of such weights give."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.vocabulary import EmbeddingOverRanks, HeadOverRanks
from torch_hybrid.ops.formats.integers import dequantized


class IntegerEmbedding(nn.Module):
    """Rows of a table of integers, each row as what it is worth.

    Args:
        weight, scales: as of a ``ScaledLinear``, a row for each token.
        dtype: of the outputs.
    """

    def __init__(self, weight: Tensor, scales: Tensor, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., width]."""
        return dequantized(self.weight[ids], self.scales[ids], self.dtype)


def dtype_of(layer: nn.Module) -> torch.dtype:
    """What a linear layer, or an embedding, gives."""
    if isinstance(layer, ScaledLinear | IntegerEmbedding):
        return layer.dtype
    if isinstance(layer, EmbeddingOverRanks | HeadOverRanks):
        return dtype_of(layer.part)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.dtype
