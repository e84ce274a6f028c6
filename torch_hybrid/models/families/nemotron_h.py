"""Nemotron-H: layers of Mamba2, of attention without positions, of an MLP or of experts alone."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.models.families.mamba2 import mamba2_from
from torch_hybrid.models.family import Family, Swap, attention_spec, listed, require, require_fields
from torch_hybrid.models.mtp import MtpLayout
from torch_hybrid.specs import LayerSpec, Mamba2Spec


def _head_types(config: Any) -> list[str]:
    types: list[str] = config.mtp_layers_block_type
    require(config, "mtp_layers_block_type[0]", types[0], ["full_attention"])
    for layer_type in types[1:]:
        require(config, "mtp_layers_block_type", layer_type, ["full_attention", "mlp", "moe"])
    return types


def _mamba2_spec(config: Any) -> Mamba2Spec:
    return Mamba2Spec(
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state_dim=config.ssm_state_size,
        num_groups=config.n_groups,
        conv_width=config.conv_kernel,
        activation=config.mamba_hidden_act,
        dt_min=config.time_step_min,  # and not time_step_limit; there is no upper limit
        gate="before_norm",
        norm_groups=config.n_groups,
        norm_eps=config.layer_norm_epsilon,
    )


class NemotronHFamily(Family):
    model_types = ("nemotron_h", "nemotron_h_omni")
    swaps: ClassVar = {"mamba2": Swap(attribute="mixer", make=mamba2_from)}
    mtp = MtpLayout(
        layers="mtp.layers.{}",
        numbered_on=False,
        fc="mtp.layers.{first}.eh_proj",
        embedding_norm="mtp.layers.{first}.enorm",
        hidden_norm="mtp.layers.{first}.hnorm",
        norm="mtp.layers.{last}.final_layernorm",
        layer_types=_head_types,
    )

    def specs(self, config: Any) -> list[LayerSpec | tuple[LayerSpec, ...]]:
        require(config, "mamba_hidden_act", config.mamba_hidden_act, ["silu"])
        require_fields(config, sliding_window=None, residual_in_fp32=False)
        if "moe" in config.layer_types:
            require(config, "mlp_hidden_act", config.mlp_hidden_act, ["relu2"])
        mixers: dict[str, LayerSpec | tuple[LayerSpec, ...]] = {
            "linear_attention": _mamba2_spec(config),
            "full_attention": attention_spec(config, head_dim=config.head_dim),
            "mlp": (),
            "moe": (),
        }
        return listed(config, mixers)

    def experts(self, module: Any) -> FusedExperts:
        return FusedExperts(module.up_proj, module.down_proj, activation="relu2")
