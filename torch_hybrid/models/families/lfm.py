"""LFM2, with experts and without, and LFM3: gated short convolutions, and attention in some layers.

LFM3 has sliding windows in some attention layers, longer convolutions, and rotary embeddings by
type of layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
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
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
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


class _ConvolutionAdapter(LinearAttentionAdapter):
    """Our convolution, for layers that before transformers 5.22 hand it no ``step``."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, seq_idx: LayerStep, **_options: object
    ) -> Tensor:
        """Map [1, T, dim] to [1, T, dim]."""
        return super().forward(hidden_states, step=seq_idx)


def _repeat_step(
    _layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand a layer the step by the one name that it has for its convolution too."""
    return args, {**options, "seq_idx": options.get("step")}


class Lfm2Family(Family):
    model_types: tuple[str, ...] = ("lfm2", "lfm2_moe", "lfm2_vl")
    swaps: ClassVar = {
        "short_convolution": Swap(attribute="conv", make=_mixer, adapter=_ConvolutionAdapter)
    }
    vision: tuple[Modality, ...] = TILES
    hf_layer_step_arguments = ("step", "seq_idx")

    def backbone(self, model: Any) -> None:
        """Let layers with a convolution take the step by both names."""
        for layer in model.layers:
            if "conv" in layer._modules:
                layer.register_forward_pre_hook(_repeat_step, with_kwargs=True)

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
