"""DeepSeek-V3: multi-head latent attention in every layer; the control of the MLA hybrids."""

from __future__ import annotations

from typing import Any

from torch_hybrid.models.family import Family, latent_spec, require
from torch_hybrid.models.mtp import next_layer
from torch_hybrid.specs import LayerSpec


class DeepseekV3Family(Family):
    model_types = ("deepseek_v3",)
    mtp = next_layer(norm="shared_head.norm")

    def specs(self, config: Any) -> list[LayerSpec]:
        require(config, "hidden_act", config.hidden_act, ["silu"])
        return [latent_spec(config, config.rope_parameters or {})] * config.num_hidden_layers
