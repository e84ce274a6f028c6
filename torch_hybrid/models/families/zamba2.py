"""Zamba2: Mamba2 in every layer, in some after a shared block of attention and MLP.

Each call of a block has keys and values of its own, low-rank adapters of its own, and takes the
embedding beside the hidden state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from torch_hybrid.models.families.mamba2 import mamba2_from
from torch_hybrid.models.family import (
    ROPE_TYPES,
    Family,
    Swap,
    attention_spec,
    listed,
    require,
    require_fields,
)
from torch_hybrid.models.taken_weights import weights_say_all
from torch_hybrid.specs import LayerSpec, Mamba2Spec

NORM_EPS = 1e-5  # of the gated norm: fixed by the model, whatever config.rms_norm_eps says
_ADAPTERS = {
    "linear_q_adapter_list",
    "linear_k_adapter_list",
    "linear_v_adapter_list",
    "gate_up_proj_adapter_list",
}


def share_children(parts: Iterable[nn.Module]) -> None:
    """Share one module among children that have the same weights, if weights say all of them."""
    ours: dict[tuple[Any, ...], nn.Module] = {}
    for part in parts:
        for name, child in list(part.named_children()):
            if (weights := tuple(child.parameters())) and weights_say_all(child):
                setattr(part, name, ours.setdefault(weights, child))


class Zamba2Family(Family):
    model_types = ("zamba2",)
    swaps: ClassVar = {"mamba2": Swap(attribute="mamba", make=mamba2_from)}

    def specs(self, config: Any) -> list[tuple[LayerSpec, ...]]:
        rope_type = (config.rope_parameters or {}).get("rope_type", "default")
        require(config, "rope_parameters.rope_type", rope_type, ROPE_TYPES)
        require_fields(config, use_conv_bias=True)
        if config.use_shared_attention_adapter:  # as wide for keys as for queries
            num_heads = config.num_attention_heads
            require(config, "num_key_value_heads", config.num_key_value_heads, [num_heads])
        head_dim = config.attention_head_dim
        attention = attention_spec(config, head_dim=head_dim, scale=(head_dim / 2) ** -0.5)
        linear = Mamba2Spec(
            num_heads=config.n_mamba_heads,
            head_dim=config.mamba_headdim,
            state_dim=config.mamba_d_state,
            num_groups=config.mamba_ngroups,
            conv_width=config.mamba_d_conv,
            dt_min=config.time_step_min,  # there is no upper limit
            gate="before_norm",
            norm_groups=config.mamba_ngroups,
            norm_eps=NORM_EPS,
        )
        mixers: dict[str, tuple[LayerSpec, ...]] = {
            "linear_attention": (linear,),
            "hybrid": (attention, linear),
        }
        return listed(config, mixers)

    def backbone(self, model: Any) -> None:
        """Leave each layer only its own adapters of all layers', and share the other children.

        Quantization and ``shard`` then treat each shared weight once.
        """
        found = (layer._modules.get("shared_transformer") for layer in model.layers)
        blocks: list[Any] = [block for block in found if block is not None]
        for index, block in enumerate(blocks):
            block.block_id = None  # else the compiler would take equal layers for different ones
            for part in (block.self_attn, block.feed_forward):
                part.block_id = None
                part.layer_dic = dict.fromkeys(range(len(model.layers)), 0)
                for name in _ADAPTERS & part._modules.keys():
                    setattr(part, name, nn.ModuleList([part.get_submodule(name)[index]]))
        share_children(part for block in blocks for part in (block.self_attn, block.feed_forward))
