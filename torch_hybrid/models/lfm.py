"""LFM2, with experts and without, and LFM3: gated short convolutions, and attention in some layers.

LFM3 has sliding windows in some attention layers, longer convolutions, and rotary embeddings by
type of layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.short_convolution import ShortConvolution
from torch_hybrid.models.family import (
    ROPE_TYPES,
    Family,
    Swap,
    attention_specs,
    head_dim_of,
    listed,
    require,
)
from torch_hybrid.models.tower import IMAGES_AND_VIDEOS, TILES, Modality
from torch_hybrid.ops.causal_conv1d.op import MAX_WIDTH, MIN_WIDTH
from torch_hybrid.specs import LayerSpec, ShortConvolutionSpec


def _specs(config: Any) -> list[LayerSpec]:
    if not MIN_WIDTH <= config.conv_L_cache <= MAX_WIDTH:
        raise UnsupportedError(
            f"{config.model_type}: config field conv_L_cache must be within {MIN_WIDTH} and "
            f"{MAX_WIDTH}, got {config.conv_L_cache}"
        )
    convolution = ShortConvolutionSpec(channels=config.hidden_size, conv_width=config.conv_L_cache)
    attention = attention_specs(config, head_dim=head_dim_of(config))
    return listed(config, {"conv": convolution, **attention})


def _mixer(module: Any, spec: ShortConvolutionSpec) -> ShortConvolution:
    with on_meta():
        mixer = ShortConvolution(module.in_proj.in_features, spec)
    mixer.in_proj, mixer.out_proj = module.in_proj, module.out_proj
    mixer.conv_weight = nn.Parameter(module.conv.weight.squeeze(1), requires_grad=False)
    mixer.conv_bias = module.conv.bias
    return mixer


class Lfm2Family(Family):
    model_types: tuple[str, ...] = ("lfm2", "lfm2_moe", "lfm2_vl")
    swaps: ClassVar = {"short_convolution": Swap(attribute="conv", make=_mixer)}
    vision: tuple[Modality, ...] = TILES

    def specs(self, config: Any) -> list[LayerSpec]:
        rope_type = config.rope_parameters["rope_type"]
        require(config, "rope_parameters.rope_type", rope_type, ROPE_TYPES)
        return _specs(config)


class Lfm3Family(Lfm2Family):
    model_types = ("lfm3", "lfm3_vl")
    vision = IMAGES_AND_VIDEOS

    def specs(self, config: Any) -> list[LayerSpec]:
        for layer_type in {*config.layer_types} - {"conv"}:
            rope_type = config.rope_parameters[layer_type]["rope_type"]
            name = f"rope_parameters.{layer_type}.rope_type"
            require(config, name, rope_type, [*ROPE_TYPES, "proportional"])
        return _specs(config)
