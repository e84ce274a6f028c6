"""Qwen3-Next: gated delta rule and gated full attention, with experts or without."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.layers.gated_delta_net import GatedDeltaNet
from torch_hybrid.models.family import (
    Family,
    Swap,
    delta_rule_spec,
    mixer_from,
    specs_by_layer_type,
    weights_of,
)
from torch_hybrid.models.mtp import MtpLayout
from torch_hybrid.specs import DeltaRuleSpec, LayerSpec


def _mixer(module: Any, spec: DeltaRuleSpec) -> GatedDeltaNet:
    """Sort rows apart, which the model interleaves by key head as ``[q, k, v, z]`` and ``[b,
    a]``."""
    ratio = spec.num_v_heads // spec.num_k_heads
    value = ratio * spec.head_v_dim
    qkvz, ba = (
        weight.unflatten(0, (spec.num_k_heads, -1))
        for weight in weights_of(module.in_proj_qkvz, module.in_proj_ba)
    )
    parts = [
        *qkvz.split([spec.head_k_dim, spec.head_k_dim, value, value], dim=1),
        *ba.split([ratio, ratio], dim=1),
    ]
    rows = [part.flatten(0, 1) for part in parts]
    return mixer_from(module, spec, rows, norm=module.norm, out=module.out_proj)


class Qwen3NextFamily(Family):
    model_types: tuple[str, ...] = ("qwen3_next",)
    swaps: ClassVar = {"gated_delta_rule": Swap(attribute="linear_attn", make=_mixer)}
    mtp: MtpLayout | None = MtpLayout(
        layers="mtp.layers.{}",
        numbered_on=False,
        fc="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        norm="mtp.norm",
    )

    def specs(self, config: Any) -> list[LayerSpec]:
        linear = delta_rule_spec(config, norm_eps=config.rms_norm_eps)
        return specs_by_layer_type(config, linear, head_dim=config.head_dim)
