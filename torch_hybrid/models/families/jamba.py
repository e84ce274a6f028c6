"""Jamba: Mamba layers, every few an attention layer without positions; experts in every other."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.layers.mamba import Mamba
from torch_hybrid.models.families.mamba import MaskedMambaAdapter, mamba_from
from torch_hybrid.models.family import (
    Family,
    Swap,
    attention_specs,
    head_dim_of,
    listed,
    require,
    require_fields,
)
from torch_hybrid.specs import LayerSpec, MambaSpec


def _mixer(module: Any, spec: MambaSpec) -> Mamba:
    mixer = mamba_from(module, spec)
    mixer.dt_norm, mixer.B_norm = module.dt_layernorm, module.b_layernorm
    mixer.C_norm = module.c_layernorm
    return mixer


class JambaFamily(Family):
    model_types = ("jamba",)
    swaps: ClassVar = {"mamba": Swap(attribute="mamba", make=_mixer, adapter=MaskedMambaAdapter)}
    hf_layer_step_arguments = ("step", "attention_mask")

    def specs(self, config: Any) -> list[LayerSpec]:
        require(config, "hidden_act", config.hidden_act, ["silu"])
        require_fields(config, sliding_window=None)
        mamba = MambaSpec(
            channels=config.mamba_expand * config.hidden_size,
            state_dim=config.mamba_d_state,
            dt_rank=config.mamba_dt_rank,
            conv_width=config.mamba_d_conv,
            activation=config.hidden_act,
            norm_eps=config.rms_norm_eps,
        )
        attention = attention_specs(config, head_dim=head_dim_of(config))
        return listed(config, {"linear_attention": mamba, **attention})
