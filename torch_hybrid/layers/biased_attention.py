"""Attention with biases by distance, and convolutions of keys, values and branches (Inkling)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.paged_attention import PagedAttentionPlan, attend, positions_of
from torch_hybrid.backends.recurrent import RecurrentPlan, convolve
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Divisible
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import RECORDS, AttentionSpec


@dataclass(eq=False, repr=False)
class BiasedAttention(Divisible):
    """Projection, convolution of keys and values, norms, attention with biases, projection.

    The convolution is added to keys and values; queries and keys are normed. A query and head has a
    bias for each distance: the mix of ``profiles`` by its ``mix``. From ``log_floor`` tokens on,
    queries and biases grow by a factor ``1 + log_alpha * log((position + 1) / log_floor)``.
    """

    spec: AttentionSpec  # the mixer's facts
    in_proj: nn.Linear  # projection to ``[q | k | v | mix]``, each by head
    o_proj: nn.Linear  # projection with weight [dim, heads * head_dim]
    q_norm: nn.Module  # norm of each head
    k_norm: nn.Module
    conv_weight: nn.Parameter  # [2 * key heads * head_dim, width], filters of keys, then of values
    profiles: nn.Parameter  # [reach, mixed], profiles of biases by distance
    log_floor: int | None = None  # growth of queries and biases; None: no growth
    log_alpha: float = 0.0

    @in_own_dtype(1)
    def forward(
        self,
        x: Tensor,
        plan: PagedAttentionPlan,
        cache: LayerCache,
        conv_plan: RecurrentPlan,
        conv_cache: LayerCache,
    ) -> Tensor:
        """Mix the tokens of a step.

        Args:
            x: [T, dim], the sequences packed as the plans say.
            plan, conv_plan: plans of attention and of the convolution.
            cache, conv_cache: this layer's pools of both. Mutated at the rows and slots that the
                plans name.

        Returns:
            [T, dim].
        """
        spec, num_mixed = self.spec, self.profiles.shape[1]
        keys_and_values = 2 * spec.num_kv_heads * spec.head_dim
        widths = spec.num_q_heads * spec.head_dim, keys_and_values, spec.num_q_heads * num_mixed
        q, kv, mix = columns(self.in_proj, x, widths)
        kv = convolved(kv, self.conv_weight, conv_plan, conv_cache, "kv")
        k, v = kv.view(-1, 2, spec.num_kv_heads, spec.head_dim).unbind(1)
        q = self.q_norm(q.unflatten(1, (spec.num_q_heads, spec.head_dim)))
        bias = F.linear(mix.reshape(-1, num_mixed), self.profiles)
        bias = bias.unflatten(0, (-1, spec.num_q_heads))
        if self.log_floor is not None:
            growth = growth_of(plan, x.shape[0], self.log_floor, self.log_alpha)
            q, bias = ((y.float() * growth).to(x.dtype) for y in (q, bias))
        o = attend(q, self.k_norm(k), v, spec, plan, cache, relative_bias=bias)
        out: Tensor = self.o_proj(o.flatten(1))
        return out

    def blocks(self) -> dict[str, Blocks]:
        spec = self.spec
        query, key = (spec.num_q_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
        mix = (spec.num_q_heads, self.profiles.shape[1])
        return {
            "in_proj": [query, key, key, mix],
            "o_proj": spec.num_q_heads,
            "conv_weight": [key, key],
        }


def growth_of(plan: PagedAttentionPlan, num_tokens: int, floor: int, alpha: float) -> Tensor:
    """Compute the factors [T, 1, 1] float32 by which each token's queries and biases grow."""
    times = (positions_of(plan, num_tokens) + 1).float() / floor
    return (1.0 + alpha * times.clamp(min=1.0).log())[:, None, None]


def convolved(
    x: Tensor,
    weight: Tensor,
    plan: RecurrentPlan,
    cache: LayerCache,
    name: str,
    *,
    scale: float = 1.0,
    token_taps: Tensor | None = None,
) -> Tensor:
    """Add to x [T, C] its causal convolution, and multiply the sum by ``scale``.

    The convolution's pool in ``cache`` is called ``name``.
    """
    pools = {"conv": name, RECORDS: f"{name}_{RECORDS}"}
    own = {pool: cache[found] for pool, found in pools.items() if found in cache}
    added = convolve(x, weight, None, plan, own, activation="none", token_taps=token_taps)
    return x + added if scale == 1.0 else ((x.float() + added.float()) * scale).to(x.dtype)


class BranchConvolution(nn.Module):
    """Causal convolution of a residual branch's output, added to that output.

    Args:
        conv_weight: [dim, width].
        branch: name of the convolution's pool.
        scale: factor of the sum.
    """

    def __init__(self, conv_weight: nn.Parameter, branch: str, scale: float = 1.0) -> None:
        super().__init__()
        self.conv_weight, self.branch, self.scale = conv_weight, branch, scale

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        """Convolve x [T, dim] -> [T, dim]; mutates the branch's pool at the plan's slots."""
        return convolved(x, self.conv_weight, plan, cache, self.branch, scale=self.scale)

    def shard(self, ranks: Ranks) -> BranchConvolution:
        """Return this layer itself: each rank has the whole output of a branch."""
        return self
