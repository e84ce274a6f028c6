"""Qwen3: full attention in every layer; the control of the hybrid families."""

from __future__ import annotations

from typing import Any

from torch_hybrid.models.family import Family, specs_by_layer_type
from torch_hybrid.specs import LayerSpec


class Qwen3Family(Family):
    model_types = ("qwen3",)

    def specs(self, config: Any) -> list[LayerSpec]:
        return specs_by_layer_type(config, None, head_dim=config.head_dim)
