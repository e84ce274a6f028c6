"""Falcon-H1: attention and Mamba2 side by side in every layer, with fixed multipliers (muP).

The model's own modules apply the multipliers around the mixers. Those within Mamba2, on the input
and on parts of its projection, are folded into the projection's rows.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from torch_hybrid.layers.mamba2 import Mamba2
from torch_hybrid.models.families.mamba2 import mamba2_from, mamba2_spec
from torch_hybrid.models.family import (
    ROPE_TYPES,
    Family,
    Logits,
    Swap,
    attention_spec,
    head_dim_of,
    require,
)
from torch_hybrid.specs import LayerSpec, Mamba2Spec


def _mixer(module: Any, spec: Mamba2Spec) -> Mamba2:
    mixer = mamba2_from(module, spec)
    scale = module.mup_vector.flatten().double()
    weight, bias = mixer.in_proj.weight, mixer.in_proj.bias
    folded = weight.double() * module.ssm_in_multiplier * scale[:, None]
    mixer.in_proj.weight = nn.Parameter(folded.to(weight.dtype), requires_grad=False)
    if bias is not None:
        mixer.in_proj.bias = nn.Parameter((bias * scale).to(bias.dtype), requires_grad=False)
    return mixer


class FalconH1Family(Family):
    model_types = ("falcon_h1",)
    swaps: ClassVar = {"mamba2": Swap(attribute="mamba", make=_mixer)}

    def specs(self, config: Any) -> list[tuple[LayerSpec, ...]]:
        rope_type = (config.rope_parameters or {}).get("rope_type", "default")
        require(config, "rope_parameters.rope_type", rope_type, ROPE_TYPES)
        attention = attention_spec(config, head_dim=head_dim_of(config))
        gate = "after_norm" if config.mamba_norm_before_gate else "before_norm"
        linear = mamba2_spec(config, gate=gate if config.mamba_rms_norm else "no_norm")
        return [(attention, linear)] * config.num_hidden_layers

    def logits(self, config: Any) -> Logits:
        return Logits(vocab_size=config.vocab_size, scale=config.lm_head_multiplier)
