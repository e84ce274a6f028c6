"""Ring-2.5 and Ling-2.5/2.6 as a model of transformers, which has no class for them, to train.

    model = BailingMoeV2_5ForCausalLM.from_pretrained(path)
    model = th.make_trainable(model)

Classes and parameters have the published names, so what ``save_pretrained`` writes is read as the
published checkpoint is. Experts are stacked in memory, as transformers stacks those of others.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridExperts,
    BailingHybridMLP,
    BailingHybridRMSNorm,
)
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from torch_hybrid.functional import lightning_attention
from torch_hybrid.layers.lightning_attention import alibi_slopes
from torch_hybrid.layers.rotary import rotate_halves, rotate_pairs
from torch_hybrid.models.ring_2_5 import Ring25Config
from torch_hybrid.models.ring_2_5.config import ARCHITECTURE
from torch_hybrid.models.ring_2_5.model import LATENT_NORM_EPS, layer_factor
from torch_hybrid.models.ring_2_5.moe import GroupLimitedRouter
from torch_hybrid.models.ring_2_5.rotary import rotary_of
from torch_hybrid.ops.ssd.gated_norm import norm_and_gate
from torch_hybrid.packing import Packing
from torch_hybrid.training.boundaries import packing_of
from torch_hybrid.training.causal_lm import kept_rows
from torch_hybrid.training.mixers.twin import by_head, gated_norm
from torch_hybrid.training.packed_attention import packed_attention


class BailingMoeV2_5Config(PreTrainedConfig):  # type: ignore[misc]
    """Fields of a published ``config.json``, whatever they are."""

    model_type = "bailing_hybrid"
    attribute_map: ClassVar = {"num_local_experts": "num_experts"}  # as the experts' class says
    initializer_range: float = 0.02
    rope_scaling: dict[str, Any] | None = None  # which transformers would rename
    tie_word_embeddings: bool = False
    use_cache: bool = False

    @property
    def sizes(self) -> Ring25Config:
        """Sizes, of which those that cannot be computed are refused."""
        return Ring25Config.from_dict(self.to_dict())


class Mixer(nn.Module):
    """Mixer that keeps packed sequences apart."""

    def __init__(self, sizes: Ring25Config, kind: str) -> None:
        super().__init__()
        self.sizes, self.rotary = sizes, sizes.rotary_specs[kind]

    def forward(self, hidden_states: Tensor, packing: Packing) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        x = hidden_states.flatten(0, 1)
        return self.mix(x, packing).view(hidden_states.shape)

    def mix(self, x: Tensor, packing: Packing) -> Tensor:
        """Map tokens [T, D] to [T, D]."""
        raise NotImplementedError


class BailingMoeV2_5LinearAttention(Mixer):
    """Lightning attention with norms and rotations of queries and keys, and a gate."""

    def __init__(self, sizes: Ring25Config, layer_id: int) -> None:
        super().__init__(sizes, "lightning_attention")
        spec, dim, eps = sizes.lightning, sizes.hidden_size, sizes.rms_norm_eps
        self.spec, self.factor = spec, layer_factor(sizes, layer_id)
        self.query_key_value = linear(dim, 3 * spec.channels)
        norm, of = (BailingHybridRMSNorm if spec.qk_norm else nn.Identity), (spec.head_dim, eps)
        self.query_layernorm, self.key_layernorm = norm(*of), norm(*of)
        self.g_proj = linear(dim, spec.channels)
        self.g_norm = GroupRMSNorm(spec.channels, spec.norm_groups, eps)
        self.dense = linear(spec.channels, dim)

    def mix(self, x: Tensor, packing: Packing) -> Tensor:
        spec, rotary = self.spec, rotary_of(self.rotary, packing.positions)
        qkv = self.query_key_value(x)
        qkv = nn.functional.silu(qkv) if spec.activation == "silu" else qkv
        q, k, v = qkv.unflatten(-1, (3, spec.num_heads, spec.head_dim)).unbind(1)
        q, k = (
            rotate_halves(norm(each), rotary).to(v.dtype)
            for norm, each in ((self.query_layernorm, q), (self.key_layernorm, k))
        )
        slopes = alibi_slopes(spec.num_heads, x.device) * self.factor
        o, _ = lightning_attention(
            q, k, v, slopes, packing, scale=spec.scale, output_final_state=False
        )
        out: Tensor = self.dense(gated_norm(self.g_norm, o.flatten(1), self.g_proj(x)))
        return out


class BailingMoeV2_5Attention(Mixer):
    """Multi-head latent attention."""

    def __init__(self, sizes: Ring25Config, layer_id: int) -> None:
        super().__init__(sizes, "latent_attention")
        self.spec = spec = sizes.latent
        dim, q_width, rank = sizes.hidden_size, spec.num_heads * spec.qk_dim, sizes.q_lora_rank
        if rank is None:
            self.q_proj = linear(dim, q_width)
        else:
            self.q_a_proj = linear(dim, rank)
            self.q_a_layernorm = BailingHybridRMSNorm(rank, LATENT_NORM_EPS)
            self.q_b_proj = linear(rank, q_width)
        self.kv_a_proj_with_mqa = linear(dim, spec.row_dim)
        self.kv_a_layernorm = BailingHybridRMSNorm(spec.latent_rank, LATENT_NORM_EPS)
        kv_width = spec.num_heads * (spec.nope_dim + spec.v_dim)
        self.kv_b_proj = linear(spec.latent_rank, kv_width)
        self.dense = linear(spec.num_heads * spec.v_dim, dim)

    def mix(self, x: Tensor, packing: Packing) -> Tensor:
        spec, rotary = self.spec, rotary_of(self.rotary, packing.positions)
        if self.sizes.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_rope = by_head(q, spec.qk_dim).split([spec.nope_dim, spec.rope_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([spec.latent_rank, spec.rope_dim], -1)
        kv = by_head(self.kv_b_proj(self.kv_a_layernorm(latent)), spec.nope_dim + spec.v_dim)
        k, v = kv.split([spec.nope_dim, spec.v_dim], -1)
        k_rope = rotate_pairs(k_rope[:, None], rotary).expand(-1, spec.num_heads, -1)
        q, k = torch.cat([q, rotate_pairs(q_rope, rotary)], -1), torch.cat([k, k_rope], -1)
        o = packed_attention(q, k, v, packing.cu_seqlens, scale=spec.scale)
        out: Tensor = self.dense(o.flatten(1))
        return out


class GroupRMSNorm(nn.Module):
    """RMS norm of groups of channels, with a gate after it."""

    activation = "sigmoid"
    norm_before_gate = True

    def __init__(self, width: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=None, device=None))
        self.n_groups, self.variance_epsilon = num_groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map [T, C] to [T, C]."""
        options: dict[str, Any] = {"num_groups": self.n_groups, "eps": self.variance_epsilon}
        return norm_and_gate(x, gate, self.weight, **options)


class BailingMoeV2_5SparseMoeBlock(nn.Module):
    """The chosen experts of each token, and one shared MLP."""

    def __init__(self, config: BailingMoeV2_5Config, sizes: Ring25Config) -> None:
        super().__init__()
        self.gate = GroupLimitedRouter(sizes, torch.get_default_dtype(), device=None)
        self.experts = BailingHybridExperts(config)
        self.shared_experts = BailingHybridMLP(config, sizes.shared_width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        x = hidden_states.flatten(0, -2)
        mixed = self.experts(x, *self.gate(x)).view(hidden_states.shape)
        out: Tensor = mixed + self.shared_experts(hidden_states)
        return out


class BailingMoeV2_5DecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """A mixer, then an MLP or experts, each behind a norm and with a residual."""

    def __init__(self, config: BailingMoeV2_5Config, sizes: Ring25Config, layer_id: int) -> None:
        super().__init__()
        is_latent = sizes.is_latent(layer_id)
        mixer = BailingMoeV2_5Attention if is_latent else BailingMoeV2_5LinearAttention
        self.attention = mixer(sizes, layer_id)
        is_dense = sizes.is_dense(layer_id)
        block = BailingMoeV2_5SparseMoeBlock
        self.mlp = BailingHybridMLP(config) if is_dense else block(config, sizes)
        self.input_layernorm = BailingHybridRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = BailingHybridRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(self, hidden_states: Tensor, packing: Packing) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        x = hidden_states + self.attention(self.input_layernorm(hidden_states), packing=packing)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BailingMoeV2_5PreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base of the decoder and of the language model."""

    base_model_prefix = "model"
    config_class = BailingMoeV2_5Config
    supports_gradient_checkpointing = True
    _input_embed_layer = "word_embeddings"
    _no_split_modules: ClassVar = ["BailingMoeV2_5DecoderLayer"]
    _keep_in_fp32_modules_strict: ClassVar = ["expert_bias"]
    _can_record_outputs: ClassVar = {"hidden_states": BailingMoeV2_5DecoderLayer}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for a decorator in this file

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (BailingHybridExperts, GroupLimitedRouter)):
            for weight in module.parameters():
                initialization.normal_(weight, mean=0.0, std=self.config.initializer_range)
        if isinstance(module, GroupLimitedRouter):
            initialization.zeros_(module.expert_bias)


class BailingMoeV2_5Model(BailingMoeV2_5PreTrainedModel):
    """Decoder."""

    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__(config)
        sizes, count = config.sizes, config.num_hidden_layers
        shape = sizes.vocab_size, sizes.hidden_size
        self.word_embeddings = nn.Embedding(*shape, dtype=None, device=None)
        self.layers = nn.ModuleList(
            BailingMoeV2_5DecoderLayer(config, sizes, layer_id) for layer_id in range(count)
        )
        self.norm = BailingHybridRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.gradient_checkpointing = False
        drafts = range(count, count + getattr(config, "num_nextn_predict_layers", 0))
        self._keys_to_ignore_on_load_unexpected = [rf"(^|\.)layers\.{i}\." for i in drafts]
        self.post_init()

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        packing: Packing | None = None,
        **options: Any,
    ) -> BaseModelOutput:
        """Run the layers over [B, S] tokens; there is no cache."""
        given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "packing": packing}
        stated = {"attention_mask": attention_mask, "position_ids": position_ids}
        packing = packing_of({**options, **given, **stated})
        hidden = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden, packing=packing)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


class BailingMoeV2_5ForCausalLM(BailingMoeV2_5PreTrainedModel):
    """Causal language model, which generates when it is served."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__(config)
        self.model = BailingMoeV2_5Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits [B, S, V], and with ``labels`` [B, S] the loss."""
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **options)
        logits = self.lm_head(kept_rows(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.vocab_size, **options)
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Make a projection without bias, where transformers says."""
    return nn.Linear(inputs, outputs, bias=False, dtype=None, device=None)


# Experts are published one by one.
register_checkpoint_conversion_mapping(
    ARCHITECTURE, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True
)
