"""Qwen3-Next: gated delta rule and gated full attention, with experts or without."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.layers.gated_delta_net import GatedDeltaNet
from torch_hybrid.models.family import (
    Family,
    Swap,
    gated_delta_rule_specs,
    mixer_from,
    weights_of,
)
from torch_hybrid.models.mtp import MTP_OF_QWEN
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
    model_types = ("qwen3_next",)
    swaps: ClassVar = {"gated_delta_rule": Swap(attribute="linear_attn", make=_mixer)}
    mtp = MTP_OF_QWEN

    def specs(self, config: Any) -> list[LayerSpec]:
        return gated_delta_rule_specs(config)
