"""Zamba: multi-head Mamba in every layer, in some after one shared block of attention and MLP.

Each call of that block has keys and values of its own, and takes the embedding beside the hidden
state.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.mamba import Mamba
from torch_hybrid.models.families.zamba2 import share_children
from torch_hybrid.models.family import Family, Swap, attention_spec, listed, parameter, require
from torch_hybrid.specs import LayerSpec, MambaSpec


def _mixer(module: Any, spec: MambaSpec) -> Mamba:
    has_bias = module.in_proj.bias is not None
    with on_meta():
        mixer = Mamba(module.in_proj.in_features, spec, bias=has_bias, conv_bias=False)

    def halves(rows: Tensor) -> nn.Parameter:
        """Return the rows of x and then those of the gate, which alternate."""
        return parameter(rows.detach().unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1))

    def by_head(weight: Tensor) -> nn.Parameter:
        """Transpose [H, outputs, inputs] for a layer of heads; drop H for a plain layer."""
        weight = weight.detach()
        alone = spec.num_heads == 1
        return parameter(weight.squeeze(0) if alone else weight.transpose(1, 2).contiguous())

    mixer.in_proj.weight = halves(module.in_proj.weight)
    if has_bias:
        mixer.in_proj.bias = halves(module.in_proj.bias)
    mixer.out_proj = module.out_proj
    mixer.x_proj.weight = by_head(module.x_proj_weight)
    mixer.dt_proj.weight = by_head(module.dt_proj_weight)
    mixer.dt_bias = parameter(module.dt_proj_bias.detach().flatten())
    mixer.conv_weight = parameter(module.conv1d.weight.squeeze(1))
    mixer.conv_bias = module.conv1d.bias
    mixer.A_log = parameter(module.A_log.detach().flatten(0, 1))
    mixer.D = parameter(module.D.detach().flatten())
    return mixer


class ZambaFamily(Family):
    model_types = ("zamba",)
    swaps: ClassVar = {"mamba": Swap(attribute="mamba", make=_mixer)}

    def specs(self, config: Any) -> list[tuple[LayerSpec, ...]]:
        require(config, "hidden_mamba_act", config.hidden_mamba_act, ["silu"])
        head_dim = config.attention_head_dim
        attention = attention_spec(config, head_dim=head_dim, scale=(head_dim / 2) ** -0.5)
        mamba = MambaSpec(
            channels=config.mamba_expand * config.hidden_size,
            state_dim=config.mamba_d_state,
            dt_rank=int(config.mamba_dt_rank),
            conv_width=config.mamba_d_conv,
            activation=config.hidden_mamba_act,
            num_heads=config.n_mamba_heads,
        )
        mixers: dict[str, tuple[LayerSpec, ...]] = {
            "linear_attention": (mamba,),
            "hybrid": (attention, mamba),
        }
        return listed(config, mixers)

    def backbone(self, model: Any) -> None:
        """Share the block's children, so that quantization and ``shard`` treat each once."""
        found = (layer._modules.get("shared_transf") for layer in model.layers)
        blocks: list[Any] = [block for block in found if block is not None]
        share_children(part for block in blocks for part in (block.self_attn, block.feed_forward))
