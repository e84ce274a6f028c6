"""Kimi-Linear: Kimi delta attention with low-rank gates, and MLA without rotary embedding."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.layers.kimi_delta_attention import KimiDeltaAttention
from torch_hybrid.models.family import Family, Swap, latent_spec, require_fields, weights_of
from torch_hybrid.models.kimi_delta import kimi_delta_mixer, kimi_delta_specs
from torch_hybrid.specs import KimiDeltaSpec, LayerSpec


def kimi_linear_mixer(module: Any, spec: KimiDeltaSpec) -> KimiDeltaAttention:
    """Make our mixer with the weights of a transformers module, whose gates are low-rank."""
    gate = module.forget_gate
    rows = weights_of(
        module.q_proj,
        module.k_proj,
        module.v_proj,
        gate.f_a_proj,
        module.g_a_proj,
        module.b_proj,
    )
    mixer = kimi_delta_mixer(module, spec, rows, gate_rank=gate.f_a_proj.out_features)
    mixer.f_b_proj, mixer.g_b_proj = gate.f_b_proj, module.g_b_proj
    return mixer


class KimiLinearFamily(Family):
    model_types = ("kimi_linear",)
    swaps: ClassVar = {"kimi_delta_attention": Swap(attribute="self_attn", make=kimi_linear_mixer)}

    def specs(self, config: Any) -> list[LayerSpec]:
        require_fields(
            config,
            mla_use_nope=True,
            moe_layer_freq=1,
            moe_router_activation_func="sigmoid",
            rope_scaling=None,
        )
        # The "rope" dims of queries and keys exist, but no rotary embedding is applied to them.
        return kimi_delta_specs(config, latent_spec(config, rope={}), gate_lower_bound=None)
