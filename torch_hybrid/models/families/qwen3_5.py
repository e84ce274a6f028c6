"""Qwen3.5, dense and mixture of experts: 3-D rotary positions, images and videos."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.layers.gated_delta_net import GatedDeltaNet
from torch_hybrid.models.families.qwen3_next import Qwen3NextFamily
from torch_hybrid.models.family import Swap, mixer_from, weights_of
from torch_hybrid.models.tower import IMAGES_AND_VIDEOS
from torch_hybrid.specs import DeltaRuleSpec


def _mixer(module: Any, spec: DeltaRuleSpec) -> GatedDeltaNet:
    rows = weights_of(module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
    return mixer_from(module, spec, rows, norm=module.norm, out=module.out_proj)


class Qwen35Family(Qwen3NextFamily):
    model_types = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
    swaps: ClassVar = {"gated_delta_rule": Swap(attribute="linear_attn", make=_mixer)}
    num_position_axes = 3
    vision = IMAGES_AND_VIDEOS
