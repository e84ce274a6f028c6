"""MiniMax-01: lightning attention and full attention, with experts in every layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.lightning_attention import LightningAttention, geometric_slopes
from torch_hybrid.models.family import Family, Swap, head_dim_of, require, specs_by_layer_type
from torch_hybrid.models.transformers_hooks import LinearAttentionPairAdapter
from torch_hybrid.specs import LayerSpec, LightningSpec

NORM_EPS = 1e-6  # of the gated norm: fixed by the model, whatever config.rms_norm_eps says


def layer_factor(layer_idx: int, num_layers: int) -> float:
    """Return a layer's factor on the decay of the first layer's heads: almost 0 in the last."""
    return 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5


def _mixer(module: Any, spec: LightningSpec) -> LightningAttention:
    """Sort rows apart, which the model interleaves by head as ``[q, k, v]``."""
    qkv = module.qkv_proj.weight.detach().unflatten(0, (spec.num_heads, 3, spec.head_dim))
    in_weight = torch.cat([qkv.transpose(0, 1).flatten(0, 2), module.output_gate.weight.detach()])
    factor = layer_factor(module.layer_idx, module.num_hidden_layers)
    slopes = geometric_slopes(spec.num_heads).to(in_weight.device) * factor
    with on_meta():
        mixer = LightningAttention(in_weight.shape[1], spec, slopes)
    mixer.in_proj.weight = nn.Parameter(in_weight, requires_grad=False)
    mixer.out_proj, mixer.norm_weight = module.out_proj, module.norm.weight
    return mixer


class MiniMaxFamily(Family):
    model_types = ("minimax",)
    swaps: ClassVar = {
        "lightning_attention": Swap(
            attribute="self_attn", make=_mixer, adapter=LinearAttentionPairAdapter
        )
    }

    def specs(self, config: Any) -> list[LayerSpec]:
        require(config, "sliding_window", config.sliding_window, [None])
        linear = LightningSpec(
            num_heads=config.num_attention_heads,
            head_dim=head_dim_of(config),
            activation=config.hidden_act,
            norm_eps=NORM_EPS,
        )
        return specs_by_layer_type(config, linear, head_dim=linear.head_dim)
