"""The family of Ring-2.5, and its mixers made of the weights of its published layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.lightning_attention import LightningAttention, alibi_slopes
from torch_hybrid.layers.rotary import Rotary
from torch_hybrid.models.family import (
    Family,
    Swap,
    latent_spec,
    listed,
    parameter,
    require_fields,
    weights_of,
)
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.specs import LayerSpec, LightningSpec


def lightning_spec(config: Any) -> LightningSpec:
    """Return the spec of the lightning layers."""
    return LightningSpec(
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        activation="silu" if config.linear_silu else "none",
        qk_norm=config.use_qk_norm,
        norm_groups=config.group_norm_size,
        norm_eps=config.rms_norm_eps,
    )


def _mixer(module: Any, spec: LightningSpec) -> LightningAttention:
    in_weight = torch.cat(weights_of(module.query_key_value, module.g_proj))
    slopes = alibi_slopes(spec.num_heads, in_weight.device) * module.factor
    with on_meta():
        mixer = LightningAttention(in_weight.shape[1], spec, slopes)
    mixer.in_proj.weight, mixer.out_proj = parameter(in_weight), module.o_proj
    mixer.norm_weight = module.g_norm.weight
    if spec.qk_norm:
        mixer.q_norm_weight = module.query_layernorm.weight
        mixer.k_norm_weight = module.key_layernorm.weight
    return mixer


class _Rotated(LinearAttentionAdapter):
    """A mixer that rotates its queries and keys."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *,
        step: LayerStep,
        position_embeddings: Mapping[str, Rotary | None],
        **_options: object,
    ) -> Tensor:
        """Map [1, T, dim] to [1, T, dim], with tables [1, T, R / 2]."""
        _, plan, cache = step.mixer(self.kind)
        tables = position_embeddings["linear_attention"]
        rotary = tables and Rotary(*(table[0] for table in tables))
        output: Tensor = self.mixer(hidden_states[0], plan, cache, rotary)
        return output[None]


class Ring25Family(Family):
    model_types = ("bailing_hybrid",)  # as Ling-3, which is another architecture
    hf_architecture = "BailingMoeV2_5ForCausalLM"
    swaps: ClassVar = {
        "lightning_attention": Swap(attribute="self_attn", make=_mixer, adapter=_Rotated)
    }

    def specs(self, config: Any) -> list[LayerSpec]:
        require_fields(
            config,
            hidden_act="silu",
            moe_router_enable_expert_bias=True,
            norm_head=False,
            norm_topk_prob=True,
            rope_interleave=True,
            score_function="sigmoid",
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            use_bias=False,
            use_qkv_bias=False,
        )
        full = latent_spec(config, config.rope_parameters)
        linear = lightning_spec(config)
        return listed(config, {"full_attention": full, "linear_attention": linear})

    def config_class(self, model_type: str) -> Any:
        from torch_hybrid.models.families.ring_2_5.classes import BailingMoeV2_5Config

        return BailingMoeV2_5Config
