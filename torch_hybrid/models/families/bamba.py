"""Bamba: Mamba2 and full attention with partial rotary embedding."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.models.families.mamba2 import mamba2_from, mamba2_spec
from torch_hybrid.models.family import (
    Family,
    Swap,
    head_dim_of,
    require_fields,
    specs_by_layer_type,
)
from torch_hybrid.specs import LayerSpec


class BambaFamily(Family):
    model_types = ("bamba",)
    swaps: ClassVar = {"mamba2": Swap(attribute="mamba", make=mamba2_from)}

    def specs(self, config: Any) -> list[LayerSpec]:
        require_fields(config, attn_rotary_emb=head_dim_of(config) // 2)
        linear = mamba2_spec(config, gate="before_norm")
        return specs_by_layer_type(config, linear, head_dim=head_dim_of(config))
