"""Ring-2.5 and Ling-2.5/2.6 as a model of transformers: Ling-3 with other mixers.

    model = BailingMoeV2_5ForCausalLM.from_pretrained(path)
    model = th.make_trainable(model)

Names in configs and checkpoints are the published ones, as are those that ``save_pretrained``
writes of a model that was read. The model runs whole texts; a runner serves it. Importing this
registers the classes with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BailingHybridConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridDecoderLayer,
    BailingHybridForCausalLM,
    BailingHybridMLP,
    BailingHybridModel,
    BailingHybridMoE,
    BailingHybridPreTrainedModel,
    BailingHybridRMSNorm,
    BailingHybridRotaryEmbedding,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from torch_hybrid.functional import lightning_attention
from torch_hybrid.layers.lightning_attention import alibi_slopes
from torch_hybrid.layers.rotary import Rotary, rotate_halves
from torch_hybrid.models.families.ring_2_5.family import Ring25Family, lightning_spec
from torch_hybrid.models.whole_texts import packing_of_rows, take_whole_texts
from torch_hybrid.ops.ssd.gated_norm import norm_and_gate
from torch_hybrid.packing import Packing


class BailingMoeV2_5Config(BailingHybridConfig):  # type: ignore[misc]
    """Config of a model, by the names of its ``config.json``; types of layers by transformers'."""

    attribute_map: ClassVar = {
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }

    layer_types: list[str] | None = None
    layer_group_size: int = 1
    group_norm_size: int = 1
    linear_rope: bool = True
    linear_silu: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    rope_interleave: bool = True
    use_qk_norm: bool = True
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **options: Any) -> None:
        size, count = self.layer_group_size, self.num_hidden_layers
        if self.layer_types is None:  # layers after the whole groups have no lightning attention
            kinds, whole = ("linear_attention", "full_attention"), count // size * size
            self.layer_types = [kinds[(i + 1) % size == 0 or i >= whole] for i in range(count)]
        self.linear_silu = options.pop("use_linear_silu", self.linear_silu)
        super().__post_init__(**options)
        self.architectures = [Ring25Family.hf_architecture]
        self.head_dim = self.linear_head_dim
        self.num_key_value_heads = self.num_attention_heads
        self.use_cache = False  # transformers has none for these layers


Tables = Mapping[str, Any]  # cosines and sines of positions, by type of layer; None: no rotation


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=None, device=None)


class BailingMoeV2_5RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, for each type of layer."""

    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__()
        width = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        self.full = BailingHybridRotaryEmbedding(_rotating(config, config.qk_rope_head_dim))
        self.linear = None
        if config.linear_rope:
            self.linear = BailingHybridRotaryEmbedding(_rotating(config, width))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tables:
        """Make tables of positions [B, S]: in x's dtype [B, S, R], for the op [B, S, R / 2]."""
        linear = None
        if self.linear is not None:
            like = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
            tables = self.linear(like, position_ids)
            linear = Rotary(*(table.chunk(2, dim=-1)[0] for table in tables))
        return {"full_attention": self.full(x, position_ids), "linear_attention": linear}


def _rotating(config: BailingMoeV2_5Config, width: int) -> BailingMoeV2_5Config:
    """Copy a config, with heads of which all dims rotate."""
    sized = copy(config)
    sized.head_dim = width
    sized.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": 1.0}
    return sized


def layer_factor(layer_idx: int, num_layers: int) -> float:
    """Compute the factor on the decay rates of a layer: 1 in the first, nearly 0 in the last.

    Layers count from 0, as in the engines that serve the model. The model file that is published
    with the weights uses ``layer_idx - 1`` here.
    """
    return 1 - layer_idx / max(num_layers - 1, 1) + 1e-5


class BailingMoeV2_5LinearAttention(nn.Module):
    """Lightning attention with norms and rotations of queries and keys, and a gate."""

    def __init__(self, config: BailingMoeV2_5Config, layer_idx: int) -> None:
        super().__init__()
        self.spec = spec = lightning_spec(config)
        self.factor = layer_factor(layer_idx, config.num_hidden_layers)
        dim = config.hidden_size
        self.query_key_value = _linear(dim, 3 * spec.channels)
        norm, of = (BailingHybridRMSNorm if spec.qk_norm else nn.Identity), spec.head_dim
        self.query_layernorm, self.key_layernorm = norm(of, spec.norm_eps), norm(of, spec.norm_eps)
        self.g_proj, self.o_proj = _linear(dim, spec.channels), _linear(spec.channels, dim)
        self.g_norm = GroupRMSNorm(spec.channels, spec.norm_groups, spec.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: Tables,
        packing: Packing | None = None,
        **_options: object,
    ) -> Tensor:
        """Map [B, T, dim] to [B, T, dim].

        ``packing`` is that of all B * T tokens; without one, each row is a text.
        """
        x, spec = hidden_states.flatten(0, 1), self.spec
        if packing is None:
            packing = packing_of_rows(hidden_states)
        qkv = self.query_key_value(x)
        qkv = nn.functional.silu(qkv) if spec.activation == "silu" else qkv
        q, k, v = qkv.unflatten(-1, (3, spec.num_heads, spec.head_dim)).unbind(1)
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        if (tables := position_embeddings["linear_attention"]) is not None:
            rows = (table.expand(*hidden_states.shape[:2], -1) for table in tables)
            rotary = Rotary(*(table.flatten(0, 1) for table in rows))
            q, k = rotate_halves(q, rotary), rotate_halves(k, rotary)
        slopes = alibi_slopes(spec.num_heads, x.device) * self.factor
        q, k, scale = q.to(v.dtype), k.to(v.dtype), spec.scale
        o, _ = lightning_attention(q, k, v, slopes, packing, scale=scale, output_final_state=False)
        out: Tensor = self.o_proj(self.g_norm(o.flatten(1), self.g_proj(x)))
        return out.view(hidden_states.shape)


class BailingMoeV2_5Attention(DeepseekV3Attention):  # type: ignore[misc]
    """Latent attention."""

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Tables, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [B, T, dim] to [B, T, dim], and attention weights if they are made."""
        tables = position_embeddings["full_attention"]
        out: tuple[Tensor, Tensor | None] = super().forward(hidden_states, tables, **options)
        return out


class GroupRMSNorm(nn.Module):
    """RMS norm of groups of channels, with a gate after it."""

    def __init__(self, width: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=None, device=None))
        self.num_groups, self.eps = num_groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map [T, C] to [T, C]."""
        return norm_and_gate(x, gate, self.weight, num_groups=self.num_groups, eps=self.eps)


class BailingMoeV2_5SparseMoeBlock(BailingHybridMoE):  # type: ignore[misc]
    """The chosen experts of each token, and one shared MLP."""

    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__(config)
        self.gate.norm_topk_prob = config.num_experts_per_tok > 1
        width = config.moe_shared_expert_intermediate_size or config.moe_intermediate_size
        self.shared_experts = BailingHybridMLP(config, width * config.n_shared_experts)


class BailingMoeV2_5DecoderLayer(BailingHybridDecoderLayer):  # type: ignore[misc]
    """A mixer, then an MLP or experts, each behind a norm and with a residual."""

    def __init__(self, config: BailingMoeV2_5Config, layer_idx: int) -> None:
        GradientCheckpointingLayer.__init__(self)
        assert config.layer_types is not None
        self.block_type = config.layer_types[layer_idx]
        is_full = self.block_type == "full_attention"
        mixer = BailingMoeV2_5Attention if is_full else BailingMoeV2_5LinearAttention
        self.self_attn = mixer(config, layer_idx)
        is_dense = config.mlp_layer_types[layer_idx] == "dense"
        self.mlp = (BailingHybridMLP if is_dense else BailingMoeV2_5SparseMoeBlock)(config)
        self.input_layernorm = BailingHybridRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = BailingHybridRMSNorm(
            config.hidden_size, config.rms_norm_eps
        )


class BailingMoeV2_5PreTrainedModel(BailingHybridPreTrainedModel):  # type: ignore[misc]
    """Base of the model with and without its head."""

    config_class = BailingMoeV2_5Config
    _no_split_modules: ClassVar = ["BailingMoeV2_5DecoderLayer"]
    # Else transformers looks into this file for attention and experts of its own.
    _can_set_attn_implementation_cached_value = True
    _can_set_experts_implementation_cached_value = True


class BailingMoeV2_5Model(BailingMoeV2_5PreTrainedModel, BailingHybridModel):  # type: ignore[misc]
    """The model without its head."""

    def __init__(self, config: BailingMoeV2_5Config) -> None:
        BailingHybridPreTrainedModel.__init__(self, config)
        dim, count = config.hidden_size, config.num_hidden_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, dim, dtype=None, device=None)
        self.layers = nn.ModuleList(BailingMoeV2_5DecoderLayer(config, i) for i in range(count))
        self.norm = BailingHybridRMSNorm(dim, config.rms_norm_eps)
        self.rotary_emb = BailingMoeV2_5RotaryEmbedding(config)
        self.gradient_checkpointing = False
        drafts = range(count, count + config.num_mtp_layers)
        self._keys_to_ignore_on_load_unexpected = [rf"(^|\.)layers\.{i}\." for i in drafts]
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Any = None, **options: Any
    ) -> Any:
        """Run the layers over whole texts, or over the tokens of a step of a runner's.

        Raises:
            UnsupportedError: texts are padded, or continue others.
        """
        if not isinstance(attention_mask, dict):
            take_whole_texts(attention_mask, options)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)


class BailingMoeV2_5ForCausalLM(BailingMoeV2_5PreTrainedModel, BailingHybridForCausalLM):  # type: ignore[misc]
    """The model and its head."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BailingMoeV2_5Config) -> None:
        BailingHybridPreTrainedModel.__init__(self, config)
        self.model = BailingMoeV2_5Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = _linear(config.hidden_size, config.vocab_size)
        self.post_init()
        self.generation_config.use_cache = False


register_checkpoint_conversion_mapping(
    BailingMoeV2_5ForCausalLM.__name__,
    get_checkpoint_conversion_mapping(BailingMoeV2_5Config.model_type),
    overwrite=True,
)
AutoModelForCausalLM.register(BailingMoeV2_5Config, BailingMoeV2_5ForCausalLM, exist_ok=True)
