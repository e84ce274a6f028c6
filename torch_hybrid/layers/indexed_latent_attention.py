"""Latent attention over the blocks that an indexer picks, with its projections and norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_hybrid.backends.indexed_attention import IndexedPlan, attend_to_blocks, pick_pooled
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.latent_attention import ByHead
from torch_hybrid.layers.mixer import Blocks, Divisible
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.specs import IndexedLatentSpec


@dataclass(eq=False, repr=False)
class IndexedLatentAttention(Divisible):
    """Projections and norms, absorbed attention to the blocks that an indexer picks, projection.

    Absorbed queries attend to latents themselves (MLA).
    """

    spec: IndexedLatentSpec  # the mixer's facts
    q_a_proj: nn.Linear  # projection to the latent of queries
    q_a_norm: nn.Module
    q_b_proj: nn.Linear  # projection from the latent of queries to the queries of all heads
    kv_a_proj: nn.Linear  # projection to the latents of keys and values
    kv_a_norm: nn.Module
    kv_b_proj: nn.Linear  # weight [num_heads * (nope_dim + v_dim), latent_rank]
    o_proj: nn.Linear  # projection from the values of all heads
    index_q_proj: nn.Linear  # projection from the latent of queries to the indexer's queries
    index_k_proj: nn.Linear  # projection to a token's index key
    index_k_norm: nn.Module
    index_gate_proj: nn.Linear  # projection to the gates that weigh a block's tokens
    index_head_proj: nn.Linear  # projection to the weights of the indexer's heads
    gate_bias: nn.Parameter  # [block_size, index_dim], added to the gates

    def __post_init__(self) -> None:
        self.to_latents, self.to_values = ByHead(), ByHead()

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
        q_latent = self.to_latents(q, to_keys.transpose(1, 2), plan.statics)
        # Last, so that attention can begin while the choice of blocks ends.
        blocks = self._pick(x, q_source, plan, cache)
        o = attend_to_blocks(q_latent, latent, None, blocks, spec, plan, cache)
        values = self.to_values(o, to_values, plan.statics)
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

    def blocks(self) -> dict[str, Blocks]:
        """Divide the heads; each rank has all latents, and all of the indexer.

        Every rank thus picks the same blocks.
        """
        spec = self.spec
        return {
            "q_b_proj": [(spec.num_heads, spec.nope_dim)],
            "kv_b_proj": [(spec.num_heads, spec.nope_dim + spec.v_dim)],
            "o_proj": spec.num_heads,
        }
