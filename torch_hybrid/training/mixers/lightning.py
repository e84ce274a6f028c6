"""Twins of mixers of lightning attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_hybrid.functional import lightning_attention
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import Submodule, TwinOfPair


class LightningAttention(TwinOfPair, of=("MiniMaxLightningAttention",)):
    """Linear attention with a fixed decay per head, normed over all heads, as in MiniMax-01."""

    act_fn: Callable[[Tensor], Tensor]
    get_slope_rate: Callable[[torch.device], Tensor]
    head_dim: int
    norm: Submodule
    num_attention_heads: int
    out_proj: Submodule
    output_gate: Submodule
    qkv_proj: Submodule

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (self.num_attention_heads, 3, self.head_dim))
        q, k, v = self.act_fn(qkv.permute(2, 0, 1, 3).contiguous()).unbind()
        slopes = self.get_slope_rate(x.device).flatten()  # a cast model has rounded its own
        o, _ = lightning_attention(q, k, v, slopes, packing, scale=1.0, output_final_state=False)
        return self.out_proj(self.output_gate(x).sigmoid() * self.norm(o.flatten(1)))
