"""Gated attention over the blocks that an indexer picks, with its projections and norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.indexed_attention import (
    IndexedPlan,
    attend_to_blocks,
    over_block,
    pick,
)
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.rotary import Rotary, rotate_halves
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import IndexedAttentionSpec


class IndexedAttention(nn.Module):
    """Projections, norms and rotation, attention to the blocks an indexer picks, gate, projection.

    Args:
        spec: the mixer's facts.
        q_proj: projection to ``[query | gate]`` of each head.
        k_proj, v_proj: projections to keys and values.
        o_proj: projection from the gated values of all heads.
        q_norm, k_norm: norms of each head's queries and keys.
        index_proj: projection to the indexer's queries, then to a token's index key.
        index_q_norm, index_k_norm: norms of each index head, and of a block's key.
    """

    def __init__(
        self,
        spec: IndexedAttentionSpec,
        *,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        o_proj: nn.Linear,
        q_norm: nn.Module,
        k_norm: nn.Module,
        index_proj: nn.Linear,
        index_q_norm: nn.Module,
        index_k_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = q_proj, k_proj, v_proj, o_proj
        self.q_norm, self.k_norm, self.index_proj = q_norm, k_norm, index_proj
        self.index_q_norm, self.index_k_norm = index_q_norm, index_k_norm
        shape = (spec.conv_channels, spec.conv_width)
        taps = torch.zeros(shape, dtype=k_proj.weight.dtype, device="cpu")
        taps[: spec.index_dim] = 1 / spec.block_size
        taps[spec.index_dim :, 0] = 1
        self.taps = nn.Buffer(taps.to(k_proj.weight.device), persistent=False)

    @in_own_dtype(1)
    def forward(self, x: Tensor, rotary: Rotary, plan: IndexedPlan, cache: LayerCache) -> Tensor:
        """Mix the tokens of a step.

        Args:
            x: [T, dim], the sequences packed as ``plan`` says.
            rotary: cosines and sines of the tokens' positions, in x's dtype.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the rows and slots that the plan names.

        Returns:
            [T, dim].
        """
        head_dim = self.spec.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * head_dim)).chunk(2, dim=-1)
        k, v = (proj(x).unflatten(-1, (-1, head_dim)) for proj in (self.k_proj, self.v_proj))
        q = rotate_halves(self.q_norm(q), rotary)
        k = rotate_halves(self.k_norm(k), rotary)
        # Last, so that attention can begin while the choice of blocks ends.
        blocks = self._pick(x, rotary, plan, cache)
        o = attend_to_blocks(q, k, v, blocks, self.spec, plan, cache)
        out: Tensor = self.o_proj((o * gate.sigmoid()).flatten(1))
        return out

    def _pick(self, x: Tensor, rotary: Rotary, plan: IndexedPlan, cache: LayerCache) -> Tensor:
        """Pick the blocks of each token.

        A block's key is the mean of its tokens' keys, rotated by the first token's position. A
        convolution computes the mean, and its first tap carries the rotation across steps.
        """
        spec = self.spec
        q, k = self.index_proj(x).split(
            [spec.num_index_heads * spec.index_dim, spec.index_dim], dim=-1
        )
        q = self.index_q_norm(q.unflatten(-1, (spec.num_index_heads, spec.index_dim)))
        beside = torch.cat([k, rotary.cos.to(k.dtype), rotary.sin.to(k.dtype)], dim=-1)
        taken = over_block(beside, self.taps, plan, cache)
        mean, cos, sin = taken.split(
            [spec.index_dim, spec.rope_dim // 2, spec.rope_dim // 2], dim=-1
        )
        keys = rotate_halves(self.index_k_norm(mean)[:, None], Rotary(cos, sin))[:, 0]
        return pick(rotate_halves(q, rotary), keys, spec, plan, cache)

    def shard(self, ranks: Ranks) -> IndexedAttention:
        """Make this rank's layer: some of the heads, and all of the indexer.

        Every rank thus picks the same blocks.

        Raises:
            UnsupportedError: the ranks do not divide the heads.
        """
        spec = self.spec
        key = (spec.num_kv_heads, spec.head_dim)
        return IndexedAttention(
            spec.divided(ranks.size),
            q_proj=ranks.rows(self.q_proj, [(spec.num_q_heads, 2 * spec.head_dim)]),
            k_proj=ranks.rows(self.k_proj, [key]),
            v_proj=ranks.rows(self.v_proj, [key]),
            o_proj=ranks.summed_columns(self.o_proj, spec.num_q_heads),
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            index_proj=self.index_proj,
            index_q_norm=self.index_q_norm,
            index_k_norm=self.index_k_norm,
        )
