"""Ling-3 (transformers' ``bailing_hybrid``): Kimi delta attention of bounded decay, gated MLA."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.layers.kimi_delta_attention import KimiDeltaAttention
from torch_hybrid.models.family import Family, Swap, latent_spec, require_fields, weights_of
from torch_hybrid.models.kimi_delta import kimi_delta_mixer, kimi_delta_specs
from torch_hybrid.models.mtp import next_layer
from torch_hybrid.specs import KimiDeltaSpec, LayerSpec


def _mixer(module: Any, spec: KimiDeltaSpec) -> KimiDeltaAttention:
    rows = weights_of(
        module.q_proj,
        module.k_proj,
        module.v_proj,
        module.forget_gate.f_proj,
        module.g_proj,
        module.b_proj,
    )
    return kimi_delta_mixer(module, spec, rows, gate_rank=None)


class BailingHybridFamily(Family):
    model_types = ("bailing_hybrid",)
    swaps: ClassVar = {"kimi_delta_attention": Swap(attribute="self_attn", make=_mixer)}
    mtp = next_layer(norm="final_layernorm")

    def specs(self, config: Any) -> list[LayerSpec]:
        require_fields(
            config,
            gated_attention_proj_granularity_type="head_wise",
            no_kda_lora=True,
            q_lora_rank=None,
            rope_interleave=True,
            score_function="sigmoid",
        )
        full = latent_spec(config, config.rope_parameters or {})
        bound = config.kda_lower_bound if config.kda_safe_gate else None
        return kimi_delta_specs(config, full, gate_lower_bound=bound)
