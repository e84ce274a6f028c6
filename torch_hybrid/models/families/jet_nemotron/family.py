"""The family of Jet-Nemotron, and its mixers made of the weights of its published layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.jet_block import JetBlock
from torch_hybrid.models.family import (
    Family,
    Swap,
    head_dim_of,
    parameter,
    specs_by_layer_type,
    weights_of,
)
from torch_hybrid.models.transformers_hooks import LinearAttentionPairAdapter
from torch_hybrid.specs import JetBlockSpec, LayerSpec

# Fields of a block's config: sizes, and what chooses among equal implementations.
_SIZES = ("num_heads", "head_dim", "expand_v", "conv_size", "dconv_generator_reduction", "norm_eps")
_HARMLESS = frozenset({"mode", "dconv_implementation"})


def block_spec(config: Any) -> JetBlockSpec:
    """Return the spec of the linear layers.

    Raises:
        UnsupportedError: the config of the layers that are no full attention is not known here.
    """
    given: Mapping[str, Any] = config.efficient_attention_config or {}
    block: Mapping[str, Any] = given.get("jet", {})
    window: Mapping[str, Any] = given.get("swa", {})
    foreign = {*given} - {"jet", "swa"} | {*block} - {*_SIZES} - _HARMLESS
    foreign |= {*window} - {"window_size"} | {*_SIZES} - {*block}
    if foreign:
        raise UnsupportedError(
            f"{config.model_type}: config field efficient_attention_config must have 'jet' with "
            f"{sorted(_SIZES)}, and 'swa' with window_size, got {dict(given)}"
        )
    width = int(block["head_dim"] * block["expand_v"])
    return JetBlockSpec(
        num_heads=block["num_heads"],
        head_k_dim=block["head_dim"],
        head_v_dim=width,
        conv_width=block["conv_size"],
        filter_rank=block["num_heads"] * width // block["dconv_generator_reduction"],
        norm_eps=float(block["norm_eps"]),
    )


def _mixer(module: Any, spec: JetBlockSpec) -> JetBlock:
    filters = module.dynamic_conv1d.kernel_generator
    rows = weights_of(
        module.q_proj,
        module.k_proj,
        module.v_proj,
        module.g_proj,
        module.b_proj,
        module.a_proj,
        filters.w1,
    )
    with on_meta():
        mixer = JetBlock(module.q_proj.in_features, spec)
    mixer.in_proj.weight = parameter(torch.cat(rows))
    mixer.filter_proj.weight = filters.w2.weight
    mixer.conv_weight = parameter(filters.w2.bias.detach().view(-1, spec.conv_width))
    mixer.out_proj = module.o_proj
    mixer.A_log, mixer.dt_bias = module.A_log, module.dt_bias
    mixer.norm_weight = module.o_norm.weight
    return mixer


class JetNemotronFamily(Family):
    model_types = ("jet_nemotron",)
    swaps: ClassVar = {
        "jet_block": Swap(attribute="self_attn", make=_mixer, adapter=LinearAttentionPairAdapter)
    }

    def specs(self, config: Any) -> list[LayerSpec]:
        return specs_by_layer_type(config, block_spec(config), head_dim=head_dim_of(config))

    def register(self) -> None:
        from torch_hybrid.models.families.jet_nemotron import classes  # noqa: F401 (registers them)
