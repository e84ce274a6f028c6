"""Multi-head latent attention over a paged cache of latents, as a module of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.latent_attention import (
    LatentPlan,
    attend_absorbed,
    attend_expanded,
    by_head,
)
from torch_hybrid.backends.statics import Statics
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Divisible
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.specs import LatentSpec


class ByHead(nn.Module):
    """Product of each head and its own rows of ``kv_b_proj``, to which adapters may add."""

    def forward(self, x: Tensor, weight: Tensor, statics: Statics) -> Tensor:
        """Multiply each head of x [T, H, K] by its own weight of [H, N, K] -> [T, H, N]."""
        return by_head(x, weight, statics)


class LatentAttention(Divisible):
    """Attention that writes new latents into pages, then reads all tokens of each sequence.

    Projections to queries and latents, norms and rotary embedding belong to the model.

    Args:
        spec: the mixer's facts.
        kv_b_proj: projection from latents to the keys (without the shared part) and values of all
            heads, weight [num_heads * (nope_dim + v_dim), latent_rank].

    Raises:
        ValueError: the weight has another shape than the spec says.
    """

    def __init__(self, spec: LatentSpec, kv_b_proj: nn.Linear) -> None:
        super().__init__()
        self.spec, self.kv_b_proj = spec, kv_b_proj
        self.to_latents, self.to_values = ByHead(), ByHead()
        expected = [spec.num_heads * (spec.nope_dim + spec.v_dim), spec.latent_rank]
        if list(kv_b_proj.weight.shape) != expected:
            raise ValueError(
                f"kv_b_proj must have a weight of shape {expected}, "
                f"got {list(kv_b_proj.weight.shape)}"
            )

    @in_own_dtype(3)
    def forward(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, plan: LatentPlan, cache: LayerCache
    ) -> Tensor:
        """Attend, in the form that the plan says.

        Args:
            q: [T, num_heads, nope_dim + rope_dim], the sequences packed as ``plan`` says; the last
                ``rope_dim`` are rotated where the model rotates.
            latent: [T, latent_rank], after its norm.
            k_rope: [T, rope_dim], the part of the key that all heads share, rotated as q.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the rows that the plan names.

        Returns:
            [T, num_heads, v_dim]; rows of padding tokens are 0.
        """
        spec = self.spec
        if plan.prefix is not None:
            return attend_expanded(q, latent, k_rope, self._expand, spec, plan, plan.prefix, cache)
        q_nope, q_rope = q.split([spec.nope_dim, spec.rope_dim], dim=-1)
        w_uk, w_uv = self._weights()
        # [T, H, nope] to [T, H, rank] and back, head by head.
        q_latent = self.to_latents(q_nope, w_uk.transpose(1, 2), plan.statics)
        out = attend_absorbed(q_latent, q_rope, latent, k_rope, spec, plan, cache)
        values: Tensor = self.to_values(out, w_uv, plan.statics)
        return values

    def blocks(self) -> dict[str, Blocks]:
        """Divide the heads; each rank has all latents."""
        return {"kv_b_proj": [(self.spec.num_heads, self.spec.nope_dim + self.spec.v_dim)]}

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Split the projection from latents into those to keys [H, nope, rank] and values
        [H, v, rank]."""
        weight = self.kv_b_proj.weight.view(self.spec.num_heads, -1, self.spec.latent_rank)
        w_uk, w_uv = weight.split([self.spec.nope_dim, self.spec.v_dim], dim=1)
        return w_uk, w_uv

    def _expand(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Expand rows [n, rank] and [n, rope] to keys [n, H, nope + rope] and values [n, H, v]."""
        spec = self.spec
        heads = F.linear(latent, self.kv_b_proj.weight).unflatten(-1, (spec.num_heads, -1))
        k_nope, v = heads.split([spec.nope_dim, spec.v_dim], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, spec.num_heads, -1)], dim=-1)
        return k, v
