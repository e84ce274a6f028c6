"""Gated attention over the blocks that an indexer picks, with its projections and norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_hybrid.backends.indexed_attention import (
    IndexedPlan,
    attend_to_blocks,
    over_block,
    pick,
)
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Divisible
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.rotary import Rotary, rotate_halves
from torch_hybrid.specs import IndexedAttentionSpec


@dataclass(eq=False, repr=False)
class IndexedAttention(Divisible):
    """Projections, norms and rotation, attention to picked blocks, gate, projection."""

    spec: IndexedAttentionSpec  # the mixer's facts
    q_proj: nn.Linear  # projection to ``[query | gate]`` of each head
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear  # projection from the gated values of all heads
    q_norm: nn.Module  # norm of each head's queries
    k_norm: nn.Module  # norm of each head's keys
    index_proj: nn.Linear  # projection to the indexer's queries, then to a token's index key
    index_q_norm: nn.Module  # norm of each index head
    index_k_norm: nn.Module  # norm of a block's key

    def __post_init__(self) -> None:
        shape = (self.spec.conv_channels, self.spec.conv_width)
        taps = torch.zeros(shape, dtype=self.k_proj.weight.dtype, device="cpu")
        taps[: self.spec.index_dim] = 1 / self.spec.block_size
        taps[self.spec.index_dim :, 0] = 1
        self.taps = nn.Buffer(taps.to(self.k_proj.weight.device), persistent=False)

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

    def blocks(self) -> dict[str, Blocks]:
        """Divide the heads; each rank has all of the indexer, so that all pick the same blocks."""
        spec = self.spec
        key: Blocks = [(spec.num_kv_heads, spec.head_dim)]
        return {
            "q_proj": [(spec.num_q_heads, 2 * spec.head_dim)],
            "k_proj": key,
            "v_proj": key,
            "o_proj": spec.num_q_heads,
        }
