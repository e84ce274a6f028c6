"""Config of Ring-2.5, read from its ``config.json``; what cannot be served is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.rotary import mscale
from torch_hybrid.models.ring_2_5.rotary import RotarySpec
from torch_hybrid.specs import LatentSpec, LayerSpec, LayerTable, LightningSpec

ARCHITECTURE = "BailingMoeV2_5ForCausalLM"

# Fields of the published model of which a single value is served.
_FIXED: Mapping[str, object] = {
    "hidden_act": "silu",
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "norm_topk_prob": True,
    "quantization_config": None,
    "rope_interleave": True,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_bias": False,
    "use_qkv_bias": False,
}


def is_ring_2_5(config: Mapping[str, Any]) -> bool:
    """Tell whether a ``config.json`` belongs to this family.

    The published ones share their ``model_type`` with Ling-3, which is another architecture.
    """
    return ARCHITECTURE in (config.get("architectures") or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring25Config:
    """Sizes of a model, by the names of its ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    layer_group_size: int
    group_norm_size: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    n_group: int
    topk_group: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    rms_norm_eps: float
    rope_theta: float
    q_lora_rank: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    partial_rotary_factor: float = 1.0
    rope_scaling: Mapping[str, Any] | None = None
    routed_scaling_factor: float = 1.0
    use_qk_norm: bool = True
    linear_rope: bool = True
    linear_silu: bool = False
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    max_position_embeddings: int | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Ring25Config:
        """Read a ``config.json``; ignore fields that change nothing here.

        Raises:
            UnsupportedError: a field has a value that is not served.
            ValueError: a field is missing.
        """
        for name, value in _FIXED.items():
            if config.get(name, value) != value:
                raise UnsupportedError(
                    f"{ARCHITECTURE}: config field {name} must be {value!r}, got {config[name]!r}"
                )
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in config]
        if missing:
            raise ValueError(f"{ARCHITECTURE}: the config has no {', '.join(missing)}")
        given = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        if "use_linear_silu" in config:
            given["linear_silu"] = config["use_linear_silu"]
        return cls(**given)

    def is_latent(self, layer_id: int) -> bool:
        """Tell whether a layer has MLA: the last of each group, and all past the whole groups."""
        size = self.layer_group_size
        whole_groups = self.num_hidden_layers // size * size
        return (layer_id + 1) % size == 0 or layer_id >= whole_groups

    def is_dense(self, layer_id: int) -> bool:
        """Tell whether a layer has one MLP instead of experts."""
        return layer_id < self.first_k_dense_replace

    @property
    def shared_width(self) -> int:
        """Width of the shared experts, which are one MLP."""
        width = self.moe_shared_expert_intermediate_size or self.moe_intermediate_size
        return width * self.num_shared_experts

    @property
    def rotary_specs(self) -> dict[str, RotarySpec]:
        """Rotary embedding of each kind of layer."""
        lightning_dim = int(self.head_dim * self.partial_rotary_factor) if self.linear_rope else 0
        dims = {"lightning_attention": lightning_dim, "latent_attention": self.qk_rope_head_dim}
        return {
            kind: RotarySpec(dim=dim, theta=self.rope_theta, scaling=self.rope_scaling)
            for kind, dim in dims.items()
        }

    @property
    def lightning(self) -> LightningSpec:
        """Spec of the lightning layers."""
        return LightningSpec(
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            activation="silu" if self.linear_silu else "none",
            qk_norm=self.use_qk_norm,
            norm_groups=self.group_norm_size,
            norm_eps=self.rms_norm_eps,
        )

    @property
    def latent(self) -> LatentSpec:
        """Spec of the MLA layers."""
        qk_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return LatentSpec(
            num_heads=self.num_attention_heads,
            latent_rank=self.kv_lora_rank,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            v_dim=self.v_head_dim,
            scale=qk_dim**-0.5 * mscale(self.rope_scaling, "mscale_all_dim") ** 2,
        )

    def table(self) -> LayerTable:
        """Make the layer table."""
        layers: list[LayerSpec] = [
            self.latent if self.is_latent(layer_id) else self.lightning
            for layer_id in range(self.num_hidden_layers)
        ]
        return LayerTable.from_specs(layers)
