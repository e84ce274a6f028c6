"""Latent attention over the blocks that an indexer picks, with its projections and norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.indexed_attention import IndexedPlan, attend_to_blocks, pick_pooled
from torch_hybrid.backends.latent_attention import by_head
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import IndexedLatentSpec


class IndexedLatentAttention(nn.Module):
    """Projections and norms, absorbed attention to the blocks that an indexer picks, projection.

    Absorbed queries attend to latents themselves (MLA).

    Args:
        spec: the mixer's facts.
        q_a_proj, q_a_norm: projection to the latent of queries, and its norm.
        q_b_proj: projection from the latent of queries to the queries of all heads.
        kv_a_proj, kv_a_norm: projection to the latents of keys and values, and its norm.
        kv_b_proj: projection from latents to the keys and values of all heads, weight [num_heads *
            (nope_dim + v_dim), latent_rank].
        o_proj: projection from the values of all heads.
        index_q_proj: projection from the latent of queries to the indexer's queries.
        index_k_proj, index_k_norm: projection to a token's index key, and its norm.
        index_gate_proj: projection to the gates that weigh a block's tokens.
        index_head_proj: projection to the weights of the indexer's heads.
        gate_bias: [block_size, index_dim], added to the gates.
    """

    def __init__(
        self,
        spec: IndexedLatentSpec,
        *,
        q_a_proj: nn.Linear,
        q_a_norm: nn.Module,
        q_b_proj: nn.Linear,
        kv_a_proj: nn.Linear,
        kv_a_norm: nn.Module,
        kv_b_proj: nn.Linear,
        o_proj: nn.Linear,
        index_q_proj: nn.Linear,
        index_k_proj: nn.Linear,
        index_k_norm: nn.Module,
        index_gate_proj: nn.Linear,
        index_head_proj: nn.Linear,
        gate_bias: nn.Parameter,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.q_a_proj, self.q_a_norm, self.q_b_proj = q_a_proj, q_a_norm, q_b_proj
        self.kv_a_proj, self.kv_a_norm, self.kv_b_proj = kv_a_proj, kv_a_norm, kv_b_proj
        self.o_proj, self.index_q_proj = o_proj, index_q_proj
        self.index_k_proj, self.index_k_norm = index_k_proj, index_k_norm
        self.index_gate_proj, self.index_head_proj = index_gate_proj, index_head_proj
        self.gate_bias = gate_bias

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: IndexedPlan, cache: LayerCache) -> Tensor:
        """Mix the tokens of a step.

        Args:
            x: [T, dim], the sequences packed as ``plan`` says.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the rows and slots that the plan names.

        Returns:
            [T, dim].
        """
        spec = self.spec
        q_source = self.q_a_norm(self.q_a_proj(x))
        latent = self.kv_a_norm(self.kv_a_proj(x))
        q = self.q_b_proj(q_source).unflatten(-1, (spec.num_heads, spec.nope_dim))
        weight = self.kv_b_proj.weight.view(spec.num_heads, -1, spec.latent_rank)
        to_keys, to_values = weight.split([spec.nope_dim, spec.v_dim], dim=1)
        # [T, H, nope] to [T, H, rank] and back, head by head.
        q_latent = by_head(q, to_keys.transpose(1, 2), plan.statics)
        # Last, so that attention can begin while the choice of blocks ends.
        blocks = self._pick(x, q_source, plan, cache)
        o = attend_to_blocks(q_latent, latent, None, blocks, spec, plan, cache)
        values = by_head(o, to_values, plan.statics)
        out: Tensor = self.o_proj(values.flatten(1))
        return out

    def _pick(self, x: Tensor, q_source: Tensor, plan: IndexedPlan, cache: LayerCache) -> Tensor:
        """Pick the blocks of each token.

        The model's positive factor of all scores is left out, since it changes no choice.
        """
        spec = self.spec
        q = self.index_q_proj(q_source).unflatten(-1, (spec.num_index_heads, spec.index_dim))
        keys = self.index_k_norm(self.index_k_proj(x))
        gates = self.index_gate_proj(x)
        weights = self.index_head_proj(x)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32)).contiguous()
        return pick_pooled(q, keys, gates, self.gate_bias, weights, spec, plan, cache)

    def shard(self, ranks: Ranks) -> IndexedLatentAttention:
        """Make this rank's layer: some of the heads, all latents, and all of the indexer.

        Every rank thus picks the same blocks.

        Raises:
            UnsupportedError: the ranks do not divide the heads.
        """
        spec = self.spec
        return IndexedLatentAttention(
            spec.divided(ranks.size),
            q_a_proj=self.q_a_proj,
            q_a_norm=self.q_a_norm,
            q_b_proj=ranks.rows(self.q_b_proj, [(spec.num_heads, spec.nope_dim)]),
            kv_a_proj=self.kv_a_proj,
            kv_a_norm=self.kv_a_norm,
            kv_b_proj=ranks.rows(self.kv_b_proj, [(spec.num_heads, spec.nope_dim + spec.v_dim)]),
            o_proj=ranks.summed_columns(self.o_proj, spec.num_heads),
            index_q_proj=self.index_q_proj,
            index_k_proj=self.index_k_proj,
            index_k_norm=self.index_k_norm,
            index_gate_proj=self.index_gate_proj,
            index_head_proj=self.index_head_proj,
            gate_bias=self.gate_bias,
        )
