"""GLM-5.3 (transformers' ``glm5_next``): Kimi delta attention of bounded decay, latent attention to
picked blocks, several residual streams, experts of clamped SwiGLU; images, videos.

The streams are one tensor, which is all that a layer hands to the next. The model's own modules mix
them before and after mixers and mixtures of experts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.indexed_latent_attention import IndexedLatentAttention
from torch_hybrid.models.families.kimi_linear import kimi_linear_mixer
from torch_hybrid.models.family import Family, Swap, TextModel, listed, require
from torch_hybrid.models.kimi_delta import kimi_delta_spec
from torch_hybrid.models.tower import IMAGES_AND_VIDEOS_OF_IMAGES
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.ranks import linear_of
from torch_hybrid.specs import IndexedLatentSpec, LayerSpec


def _indexed_latent_attention(module: Any, spec: IndexedLatentSpec) -> IndexedLatentAttention:
    indexer = module.indexer
    return IndexedLatentAttention(
        spec,
        q_a_proj=module.q_a_proj,
        q_a_norm=module.q_a_layernorm,
        q_b_proj=module.q_b_proj,
        kv_a_proj=module.kv_a_proj_with_mqa,
        kv_a_norm=module.kv_a_layernorm,
        kv_b_proj=module.kv_b_proj,
        o_proj=module.o_proj,
        index_q_proj=indexer.wq_b,
        index_k_proj=indexer.wk,
        index_k_norm=indexer.k_norm,
        index_gate_proj=linear_of(indexer.index_kpool_compress_gate),
        index_head_proj=indexer.weights_proj,
        gate_bias=indexer.index_kpool_compress_ape,
    )


class _IndexedLatentAdapter(LinearAttentionAdapter):
    """Our attention in the place of the model's."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, step: LayerStep, **_options: object
    ) -> tuple[Tensor, None, None]:
        """Map [1, T, dim] to [1, T, dim]; attention weights and picked blocks are None."""
        return super().forward(hidden_states, step=step), None, None


@cache
def _text_class() -> type[nn.Module]:
    from transformers import GenerationMixin
    from transformers.models.glm5_next import modeling_glm5_next as theirs

    class Glm5NextForCausalLM(
        TextModel,
        theirs.Glm5NextPreTrainedModel,  # type: ignore[misc]
        GenerationMixin,  # type: ignore[misc]
    ):
        """The text model with its head, which transformers has only inside the multimodal model."""

        __module__ = theirs.__name__  # where transformers looks up what its experts can do
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = theirs.Glm5NextTextModel(config)
            like = self.model.embed_tokens.weight
            sizes = config.hidden_size, config.vocab_size
            self.lm_head = nn.Linear(*sizes, bias=False, device=like.device, dtype=like.dtype)
            self.post_init()

    return Glm5NextForCausalLM


class Glm5NextFamily(Family):
    model_types = ("glm5_next", "glm5_next_text")
    swaps: ClassVar = {
        "kimi_delta_attention": Swap(attribute="self_attn", make=kimi_linear_mixer),
        "indexed_latent_attention": Swap(
            attribute="self_attn", make=_indexed_latent_attention, adapter=_IndexedLatentAdapter
        ),
    }
    vision = IMAGES_AND_VIDEOS_OF_IMAGES

    def specs(self, config: Any) -> list[LayerSpec]:
        require(config, "qk_rope_head_dim", config.qk_rope_head_dim, [0])
        always_tail = config.index_kpool_always_select_tail
        require(config, "index_kpool_always_select_tail", always_tail, [True])
        # Layers of another type attend to the blocks that the layer before them picked: not served.
        for picks in config.indexer_types:
            require(config, "indexer_types", picks, ["full"])
        indexed = IndexedLatentSpec(
            num_heads=config.num_attention_heads,
            latent_rank=config.kv_lora_rank,
            nope_dim=config.qk_nope_head_dim,
            v_dim=config.v_head_dim,
            scale=config.qk_nope_head_dim**-0.5,
            num_index_heads=config.index_n_heads,
            index_dim=config.index_head_dim,
            block_size=config.index_kpool,
            top_k=config.index_topk // config.index_kpool,
        )
        linear = kimi_delta_spec(config, gate_lower_bound=config.linear_lower_bound)
        return listed(config, {"indexed_attention": indexed, "linear_attention": linear})

    def experts(self, module: Any) -> FusedExperts:
        return FusedExperts(module.gate_up_proj, module.down_proj, limit=module.swiglu_limit)

    def text_class(self) -> type[nn.Module]:
        return _text_class()
