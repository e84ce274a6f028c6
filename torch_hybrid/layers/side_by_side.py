"""Projections that consist of several linear layers of one input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_hybrid.layers.scaled_linear import ScaledLinear


class SideBySide(nn.Module):
    """Linear layers of one input, whose outputs are concatenated.

    A merged projection becomes this if only some of its rows are quantized, or if the blocks of
    their scales do not align.
    """

    def __init__(self, parts: Sequence[nn.Linear | ScaledLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        """Project x [..., inputs] -> [..., outputs of all parts]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def columns(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """Project x, and split the outputs by widths; a stretch within one part is not copied."""
        outputs = [part(x) for part in self.parts]
        found = []
        for width in widths:
            stretch: list[Tensor] = []
            while width > 0:
                first = outputs.pop(0)
                taken = min(width, first.shape[-1])
                stretch.append(first.narrow(-1, 0, taken))
                if taken < first.shape[-1]:
                    outputs.insert(0, first.narrow(-1, taken, first.shape[-1] - taken))
                width -= taken
            found.append(stretch[0] if len(stretch) == 1 else torch.cat(stretch, dim=-1))
        return found


def columns(projection: nn.Module, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """Project x, and split the outputs by widths, which add up to all outputs."""
    if isinstance(projection, SideBySide):
        return projection.columns(x, widths)
    split: Sequence[Tensor] = projection(x).split(list(widths), dim=-1)
    return split
