"""Twins of mixers that are a short convolution."""

from __future__ import annotations

from torch import Tensor, nn

from torch_hybrid.functional import causal_conv1d
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import Submodule, Twin


class ShortConv(Twin):
    """Short convolution between two gates, as in LFM2 and LFM3."""

    conv: nn.Conv1d
    in_proj: Submodule
    out_proj: Submodule

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        before, after, x = self.in_proj(x).chunk(3, -1)
        weight, bias = self.conv.weight.squeeze(1).to(x.dtype), self.conv.bias
        bias = None if bias is None else bias.to(x.dtype)
        x, _ = causal_conv1d(before * x, weight, bias, packing=packing, output_final_state=False)
        return self.out_proj(after * x)
