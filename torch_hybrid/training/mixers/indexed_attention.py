"""Twins of attention to the blocks that an indexer picks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import Submodule, Twin, by_head
from torch_hybrid.training.packed_attention import packed_attention
from torch_hybrid.training.picked_blocks import over_block, pick_blocks, pool_blocks


class IndexedTwin(Twin):
    """Attention whose own forward knows no packed sequences."""

    attention_dropout: float
    indexer: Any  # transformers' own, whose modules are read
    o_proj: Submodule
    scaling: float

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, packing: Packing, block_size: int
    ) -> Tensor:
        """Attend to picked blocks; map [T, heads, dim] to [T, heads * dim]."""
        out = packed_attention(
            *(q.to(v.dtype), k.to(v.dtype), v, packing.cu_seqlens),
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            blocks=blocks,
            block_size=block_size,
        )
        return out.flatten(1)


class IndexedAttention(IndexedTwin, of=("Qwen4ExpTextAttention",)):
    """Attention to blocks whose keys are the means of their tokens', as in Qwen4-Exp."""

    head_dim: int
    k_norm: Submodule
    k_proj: Submodule
    q_norm: Submodule
    q_proj: Submodule
    v_proj: Submodule

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        packing: Packing | None = None,
        **options: Any,
    ) -> Any:
        """Map [B, S, D] to [B, S, D] and None."""
        if packing is None:
            rest = (position_embeddings, *args)
            return super().forward(hidden_states, *rest, **options)
        x = hidden_states.flatten(0, 1)
        rows = (each.expand(hidden_states.shape[0], -1, -1) for each in position_embeddings)
        cos, sin = (each.flatten(0, 1) for each in rows)
        q, gate = by_head(self.q_proj(x), 2 * self.head_dim).chunk(2, -1)
        k, v = (by_head(each(x), self.head_dim) for each in (self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)
        blocks = self.picked(x, cos, sin, packing)
        out = self.attend(q, k, v, blocks, packing, self.indexer.compress_ratio)
        out = self.o_proj(out * gate.flatten(1).sigmoid())
        return out.view(hidden_states.shape), None

    @torch.no_grad()
    def picked(self, x: Tensor, cos: Tensor, sin: Tensor, packing: Packing) -> Tensor:
        """Pick blocks for each token."""
        own, size = self.indexer, self.indexer.compress_ratio
        qk = by_head(own.index_qk_proj(x), own.index_head_dim)
        q = apply_rotary_pos_emb(own.q_layernorm(qk[:, :-1]), None, cos, sin)
        keys = over_block(qk[:, -1], size).mean(-1, dtype=torch.float32).to(qk.dtype)
        first = (over_block(each, size)[..., 0] for each in (cos, sin))  # of a block's first token
        keys = apply_rotary_pos_emb(own.k_layernorm(keys)[:, None], None, *first)
        return pick_blocks(q, keys[:, 0], None, packing, block_size=size, top_k=own.block_topk)


class IndexedLatentAttention(IndexedTwin, of=("Glm5NextTextAttention",)):
    """Latent attention to blocks whose keys are pooled by gates, as in GLM-5.3."""

    config: Any
    kv_a_layernorm: Submodule
    kv_a_proj_with_mqa: Submodule
    kv_b_proj: Submodule
    kv_lora_rank: int
    next_skip_topk: bool
    q_a_layernorm: Submodule
    q_a_proj: Submodule
    q_b_proj: Submodule
    qk_head_dim: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        packing: Packing | None = None,
        prev_topk_indices: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Map [B, S, D] to [B, S, D], None, and what the next layer picks too or None."""
        if packing is None:
            options["prev_topk_indices"] = prev_topk_indices
            return super().forward(hidden_states, *args, **options)
        x = hidden_states.flatten(0, 1)
        latent_q = self.q_a_layernorm(self.q_a_proj(x))
        q = by_head(self.q_b_proj(latent_q), self.qk_head_dim)
        widths = [self.kv_lora_rank, self.qk_rope_head_dim]
        latent, shared = self.kv_a_proj_with_mqa(x).split(widths, -1)
        widths = [self.qk_nope_head_dim, self.v_head_dim]
        k, v = by_head(self.kv_b_proj(self.kv_a_layernorm(latent)), sum(widths)).split(widths, -1)
        k = torch.cat([k, shared[:, None].expand(*k.shape[:-1], -1)], -1)
        blocks = prev_topk_indices
        if self.indexer is not None:
            blocks = self.picked(x, latent_q, packing)
        if blocks is None:
            raise ValueError("the layer before one that shares picked blocks must pick, got none")
        out = self.attend(q, k, v, blocks, packing, self.config.index_kpool)
        out = self.o_proj(out).view(hidden_states.shape)
        return out, None, blocks if self.next_skip_topk else None

    @torch.no_grad()
    def picked(self, x: Tensor, latent_q: Tensor, packing: Packing) -> Tensor:
        """Pick blocks for each token."""
        own, size = self.indexer, self.indexer.index_kpool
        if not own.index_kpool_always_select_tail:
            raise UnsupportedError("index_kpool_always_select_tail must be True, got False")
        q, keys = by_head(own.wq_b(latent_q), own.head_dim), own.k_norm(own.wk(x))
        gates = linear(x, own.index_kpool_compress_gate)
        keys = pool_blocks(keys, gates, own.index_kpool_compress_ape, packing)
        weights, top_k = own.weights_proj(x), own.index_topk // size
        return pick_blocks(q, keys, weights, packing, block_size=size, top_k=top_k)
