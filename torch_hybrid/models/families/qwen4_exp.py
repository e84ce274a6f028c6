"""Qwen4-Exp: gated delta rule, attention to blocks that an indexer picks, several residual streams,
and embeddings of n-grams that enter them; images and videos.

The streams stand side by side in one tensor, which is all that a layer hands to the next. The
model's own modules mix them before and after mixers and mixtures of experts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.indexed_attention import IndexedAttention
from torch_hybrid.layers.ngram_embedding import NgramEmbedding
from torch_hybrid.layers.rotary import Rotary
from torch_hybrid.models.families.qwen3_5 import Qwen35Family
from torch_hybrid.models.family import ROPE_TYPES, Family, Swap, delta_rule_spec, require
from torch_hybrid.models.tower import IMAGES_AND_VIDEOS
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.ops.causal_conv1d.op import MAX_WIDTH
from torch_hybrid.specs import IndexedAttentionSpec, LayerSpec, NgramSpec

# Sizes whose reciprocals are exact in any dtype, and that fit a convolution's width.
_BLOCK_SIZES = (2, 4, 8, 16)


def _indexed_spec(config: Any) -> IndexedAttentionSpec:
    rope = config.rope_parameters or {}
    require(config, "rope_parameters.rope_type", rope.get("rope_type", "default"), ROPE_TYPES)
    require(config, "indexer_compress_ratio", config.indexer_compress_ratio, _BLOCK_SIZES)
    return IndexedAttentionSpec(
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        num_index_heads=config.indexer_n_heads,
        index_dim=config.indexer_head_dim,
        rope_dim=int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
        block_size=config.indexer_compress_ratio,
        top_k=config.indexer_budget // config.indexer_compress_ratio,
    )


def _ngram_spec(config: Any) -> NgramSpec:
    conv_width = (config.ple_conv_kernel_size - 1) * config.ngram_size + 1
    if conv_width > MAX_WIDTH:
        raise UnsupportedError(
            f"{config.model_type}: the convolution over n-grams may reach back over {MAX_WIDTH} "
            f"tokens, got {conv_width} of ple_conv_kernel_size {config.ple_conv_kernel_size} and "
            f"ngram_size {config.ngram_size}"
        )
    return NgramSpec(
        ngram_size=config.ngram_size,
        channels=config.hc_count * config.hidden_size,
        conv_width=conv_width,
    )


def _indexed_attention(module: Any, spec: IndexedAttentionSpec) -> IndexedAttention:
    indexer = module.indexer
    return IndexedAttention(
        spec,
        q_proj=module.q_proj,
        k_proj=module.k_proj,
        v_proj=module.v_proj,
        o_proj=module.o_proj,
        q_norm=module.q_norm,
        k_norm=module.k_norm,
        index_proj=indexer.index_qk_proj,
        index_q_norm=indexer.q_layernorm,
        index_k_norm=indexer.k_layernorm,
    )


def _ngram_embedding(module: Any, spec: NgramSpec) -> NgramEmbedding:
    """Make our embedding; its convolution has taps of zero where the model's is dilated."""
    hashed = module.ple_embedding
    taps = module.conv1d.weight.detach().squeeze(1).split(1, dim=1)
    apart = [tap * factor for tap in taps for factor in (1.0, *[0.0] * (spec.ngram_size - 1))]
    weight = torch.cat(apart[: spec.conv_width], dim=1)
    return NgramEmbedding(
        spec,
        table=hashed.ngram_embedding.weight,
        multipliers=hashed.layer_multipliers,
        head_sizes=hashed.ngram_heads_vocab_sizes,
        head_offsets=hashed.ngram_heads_offsets,
        eos=hashed.eos_token_id,
        key_proj=module.key_proj,
        value_proj=module.value_proj,
        key_norm=module.norm_key,
        stream_norm=module.norm_query,
        conv_norm=module.norm_conv,
        conv_weight=nn.Parameter(weight, requires_grad=False),
    )


class _IndexedAttentionAdapter(LinearAttentionAdapter):
    """Our attention in the place of the model's."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        step: LayerStep,
        **_options: object,
    ) -> tuple[Tensor, None]:
        """Map [1, T, dim] to [1, T, dim] and no attention weights."""
        _, plan, cache = step.mixer(self.kind)
        # Each half of a rotated head has the same angles.
        cos, sin = (x[0, :, : x.shape[-1] // 2] for x in position_embeddings)
        return self.mixer(hidden_states[0], Rotary(cos, sin), plan, cache)[None], None


class _NgramAdapter(LinearAttentionAdapter):
    """Our per-layer embedding in the place of the model's, which gets no options from its layer."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, tokens: Tensor, step: LayerStep, conv_mask: None = None
    ) -> Tensor:
        """Map streams [1, T, channels] and tokens [1, T] to [1, T, channels]."""
        _, plan, cache = step.mixer(self.kind)
        out: Tensor = self.mixer(hidden_states[0], tokens[0], plan, cache)
        return out[None]


class Qwen4ExpFamily(Family):
    model_types = ("qwen4_exp", "qwen4_exp_text")
    swaps: ClassVar = {
        **Qwen35Family.swaps,
        "indexed_attention": Swap(
            attribute="self_attn", make=_indexed_attention, adapter=_IndexedAttentionAdapter
        ),
        "ngram_embedding": Swap(attribute="ple", make=_ngram_embedding, adapter=_NgramAdapter),
    }
    num_position_axes = 3
    hf_layer_step_arguments = ("step", "past_key_values", "cache")
    hf_token_arguments = ("ple_input_ids",)
    vision = IMAGES_AND_VIDEOS

    def specs(self, config: Any) -> list[LayerSpec | tuple[LayerSpec, ...]]:
        require(config, "hidden_act", config.hidden_act, ["silu"])
        gate = config.output_gate_type or "silu"
        require(config, "output_gate_type", gate, ["silu", "sigmoid"])
        linear = delta_rule_spec(config, norm_eps=config.rms_norm_eps, gate=gate)
        if "indexed_attention" in config.layer_types:
            indexed = _indexed_spec(config)
        if config.ple_layer_ids:
            ngrams = _ngram_spec(config)

        def layer(number: int, layer_type: str) -> LayerSpec | tuple[LayerSpec, ...]:
            if layer_type == "indexed_attention":
                return indexed
            return (linear, ngrams) if number in config.ple_layer_ids else linear

        return [layer(*numbered) for numbered in enumerate(config.layer_types, start=1)]
