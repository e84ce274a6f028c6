"""Twins of mixers that are a short convolution."""

from __future__ import annotations

from torch import Tensor, nn

from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import Submodule, Twin, convolved


class ShortConv(Twin):
    """Short convolution between two gates, as in LFM2 and LFM3."""

    conv: nn.Conv1d
    in_proj: Submodule
    out_proj: Submodule

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        before, after, x = self.in_proj(x).chunk(3, -1)
        return self.out_proj(after * convolved(self.conv, before * x, packing))
