"""Granite-4-H: Mamba2 and full attention, rotary or without positions, with experts or without.

The model's own modules apply its embedding and residual multipliers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.models.families.mamba2 import mamba2_from, mamba2_spec
from torch_hybrid.models.family import (
    Family,
    Logits,
    Swap,
    head_dim_of,
    require,
    require_fields,
    specs_by_layer_type,
)
from torch_hybrid.specs import LayerSpec


class GraniteMoeHybridFamily(Family):
    model_types = ("granitemoehybrid",)
    swaps: ClassVar = {"mamba2": Swap(attribute="mamba", make=mamba2_from)}

    def specs(self, config: Any) -> list[LayerSpec]:
        positions = config.position_embedding_type
        require(config, "position_embedding_type", positions, ["rope", "nope", None])
        require_fields(config, normalization_function="rmsnorm")
        linear = mamba2_spec(config, gate="before_norm")
        return specs_by_layer_type(
            config, linear, head_dim=head_dim_of(config), scale=config.attention_multiplier
        )

    def logits(self, config: Any) -> Logits:
        return Logits(vocab_size=config.vocab_size, scale=1 / config.logits_scaling)
