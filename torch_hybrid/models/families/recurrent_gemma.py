"""RecurrentGemma: real-gated linear recurrent units, and attention to a window in some layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.rg_lru import RgLru
from torch_hybrid.models.family import (
    Family,
    Logits,
    Swap,
    attention_specs,
    listed,
    parameter,
    require,
)
from torch_hybrid.models.transformers_hooks import LinearAttentionPairAdapter
from torch_hybrid.specs import LayerSpec, RgLruSpec


def _mixer(module: Any, spec: RgLruSpec) -> RgLru:
    with on_meta():
        mixer = RgLru(module.linear_x.in_features, spec)
    lru, inputs = module.rg_lru, (module.linear_x, module.linear_y)
    mixer.in_proj.weight = parameter(torch.cat([linear.weight.detach() for linear in inputs]))
    mixer.in_proj.bias = parameter(torch.cat([linear.bias.detach() for linear in inputs]))
    mixer.out_proj = module.linear_out
    mixer.conv_weight = parameter(module.conv_1d.weight.detach().squeeze(1))
    mixer.conv_bias = module.conv_1d.bias
    weights = (lru.input_gate_weight.detach(), lru.recurrent_gate_weight.detach())
    biases = (lru.input_gate_bias.detach(), lru.recurrent_gate_bias.detach())
    mixer.gates.weight = parameter(torch.cat(weights, dim=-1))
    mixer.gates.bias = parameter(torch.cat(biases, dim=-1))
    mixer.a_param = lru.recurrent_param
    return mixer


class RecurrentGemmaFamily(Family):
    model_types = ("recurrent_gemma",)
    swaps: ClassVar = {
        "rg_lru": Swap(attribute="temporal_block", make=_mixer, adapter=LinearAttentionPairAdapter)
    }

    def specs(self, config: Any) -> list[LayerSpec]:
        require(config, "hidden_activation", config.hidden_activation, ["gelu_pytorch_tanh"])
        rope_type = config.rope_parameters["rope_type"]
        require(config, "rope_parameters.rope_type", rope_type, ["default"])
        for kind in config.block_types:
            require(config, "block_types", kind, ["attention", "recurrent"])
        head_dim, rest = divmod(config.lru_width, config.num_attention_heads)
        if rest:
            raise UnsupportedError(
                f"{config.model_type}: config field lru_width must be a multiple of the "
                f"{config.num_attention_heads} heads, got {config.lru_width}"
            )
        recurrent = RgLruSpec(
            num_heads=config.num_attention_heads, head_dim=head_dim, conv_width=config.conv1d_width
        )
        attention = attention_specs(config, head_dim=config.head_dim)
        return listed(config, {**attention, "linear_attention": recurrent})

    def logits(self, config: Any) -> Logits:
        return Logits(vocab_size=config.vocab_size, softcap=config.logits_soft_cap)
