"""Twins of mixers that are a short convolution."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import Submodule, Twin, convolved


class ShortConv(Twin, of=("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")):
    """Short convolution between two gates, as in LFM2 and LFM3.

    Before transformers 5.22 layers hand it no packing but that in place of a mask.
    """

    conv: nn.Conv1d
    in_proj: Submodule
    out_proj: Submodule

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        attention_mask: Any = None,
        packing: Packing | None = None,
        **options: Any,
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        if isinstance(attention_mask, Packing):
            return super().forward(hidden_states, packing=attention_mask)
        options["attention_mask"] = attention_mask
        return super().forward(hidden_states, *args, packing=packing, **options)

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        before, after, x = self.in_proj(x).chunk(3, -1)
        return self.out_proj(after * convolved(self.conv, before * x, packing))
