"""Attention with biases by distance and sinks, of clipped heads, with a gate (Inkling-2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.paged_attention import PagedAttentionPlan, attend_with_sinks
from torch_hybrid.backends.recurrent import RecurrentPlan
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.biased_attention import convolved, growth_of
from torch_hybrid.layers.mixer import Blocks, Divisible
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ranks import Block
from torch_hybrid.specs import AttentionSpec


@dataclass(eq=False, repr=False)
class SinkAttention(Divisible):
    """Projection, convolution of keys and values, clips, attention with sinks, gate, projection.

    The convolution is added to keys and values. Queries, keys and mixes are clipped, values normed.
    A query and head has a bias for each distance: the mix of ``profiles`` by its ``mix``. It also
    has a sink: one more logit, whose value is zero. From ``log_floor`` tokens on, queries and
    biases grow by a factor ``1 + log_alpha * log((position + 1) / log_floor)``.
    """

    spec: AttentionSpec  # the mixer's facts
    in_proj: nn.Linear  # projection to ``[q | mix | gate | sink | k | v]``, each by head
    o_proj: nn.Linear  # projection with weight [dim, heads * head_dim]
    q_scale: nn.Parameter  # [heads, head_dim], factor of q before its clip
    mix_scale: nn.Parameter  # [heads, mixed], factor of mix before its clip
    qk_clip: float  # the largest norm of a head of queries or keys
    mix_clip: float  # the largest norm of a mix
    norm_eps: float  # epsilon of the norm of values
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
        widths = [heads * width for heads, width in self._query_blocks]
        keys_and_values = 2 * self.spec.num_kv_heads * self.spec.head_dim
        q, mix, gate, sink, kv = columns(self.in_proj, x, [*widths, keys_and_values])
        scale = (self.conv_weight.shape[1] + 1) ** -0.5  # of a sum of width + 1 terms
        kv = convolved(kv, self.conv_weight, conv_plan, conv_cache, "kv", scale=scale)
        return self._attend(q, mix, gate, sink, kv, plan, cache)

    @property
    def _query_blocks(self) -> list[Block]:
        """Heads and their width in q, mix, gate and sink."""
        head_dim, mixed = self.spec.head_dim, self.profiles.shape[1]
        return [(self.spec.num_q_heads, width) for width in (head_dim, mixed, head_dim, 1)]

    def _attend(
        self,
        q: Tensor,
        mix: Tensor,
        gate: Tensor,
        sink: Tensor,
        kv: Tensor,
        plan: PagedAttentionPlan,
        cache: LayerCache,
    ) -> Tensor:
        """Attend with projected inputs [T, heads * width], of which kv is convolved -> [T, dim]."""
        spec = self.spec
        q = q.unflatten(1, (spec.num_q_heads, -1)).float() * self.q_scale.float()
        mix = mix.unflatten(1, (spec.num_q_heads, -1)).float() * self.mix_scale.float()
        q, mix = _clipped(q, self.qk_clip), _clipped(mix, self.mix_clip)
        if self.log_floor is not None:
            growth = growth_of(plan, q.shape[0], self.log_floor, self.log_alpha)
            q, mix = q * growth, mix * growth
        k, v = kv.view(-1, 2, spec.num_kv_heads, spec.head_dim).float().unbind(1)
        k = _clipped(k, self.qk_clip)
        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.norm_eps)
        q, k, v, mix = (y.to(kv.dtype) for y in (q, k, v, mix))
        bias = F.linear(mix.flatten(0, 1), self.profiles).unflatten(0, (-1, spec.num_q_heads))
        o = attend_with_sinks(q, k, v, sink, spec, plan, cache, relative_bias=bias)
        gated = o.flatten(1) * torch.sigmoid(gate.float())
        out: Tensor = self.o_proj(gated.to(kv.dtype))
        return out

    def blocks(self) -> dict[str, Blocks]:
        heads, key = self.spec.num_q_heads, (self.spec.num_kv_heads, self.spec.head_dim)
        return {
            "in_proj": [*self._query_blocks, key, key],
            "o_proj": heads,
            "q_scale": [(heads, 1)],
            "mix_scale": [(heads, 1)],
            "conv_weight": [key, key],
        }


@dataclass(eq=False, repr=False, kw_only=True)
class SeparateSinkAttention(SinkAttention):
    """Sink attention with separate inputs for queries, keys and values.

    ``in_proj`` gives ``[q | mix | gate | sink]``.
    """

    k_proj: nn.Linear  # projection to keys by head
    v_proj: nn.Linear  # projection to values by head

    @in_own_dtype(3)
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        of_keys: Tensor,
        of_values: Tensor,
        plan: PagedAttentionPlan,
        cache: LayerCache,
        conv_plan: RecurrentPlan,
        conv_cache: LayerCache,
    ) -> Tensor:
        """Mix the tokens of a step; see ``SinkAttention.forward``.

        The inputs of queries, keys and values are [T, dim] each.
        """
        widths = [heads * width for heads, width in self._query_blocks]
        q, mix, gate, sink = columns(self.in_proj, x, widths)
        kv = self._convolved(of_keys, of_values, conv_plan, conv_cache)
        return self._attend(q, mix, gate, sink, kv, plan, cache)

    def _convolved(
        self, of_keys: Tensor, of_values: Tensor, plan: RecurrentPlan, cache: LayerCache
    ) -> Tensor:
        """Project the inputs of keys and of values, and convolve both: [T, 2 * heads * width]."""
        kv = torch.cat([self.k_proj(of_keys), self.v_proj(of_values)], 1)
        scale = (self.conv_weight.shape[1] + 1) ** -0.5  # of a sum of width + 1 terms
        return convolved(kv, self.conv_weight, plan, cache, "kv", scale=scale)

    @property
    def _key_blocks(self) -> list[Block]:
        """Heads and their width in what keys, or values, are projected to."""
        return [(self.spec.num_kv_heads, self.spec.head_dim)]

    def blocks(self) -> dict[str, Blocks]:
        keys: Blocks = self._key_blocks
        own: dict[str, Blocks] = {"in_proj": self._query_blocks, "k_proj": keys, "v_proj": keys}
        return super().blocks() | own


@dataclass(eq=False, repr=False, kw_only=True)
class DynamicSinkAttention(SeparateSinkAttention):
    """Sink attention with separate inputs for queries, keys and values, and dynamic filters.

    Each token adds taps of its own to the convolution's filters, for each head of keys and values.
    ``k_proj`` and ``v_proj`` give ``[k | taps]`` and ``[v | taps]``, the taps oldest first.
    """

    def _convolved(
        self, of_keys: Tensor, of_values: Tensor, plan: RecurrentPlan, cache: LayerCache
    ) -> Tensor:
        widths = [heads * width for heads, width in self._key_blocks]
        k, k_taps = columns(self.k_proj, of_keys, widths)
        v, v_taps = columns(self.v_proj, of_values, widths)
        width = self.conv_weight.shape[1]
        return convolved(
            torch.cat([k, v], 1),
            self.conv_weight,
            plan,
            cache,
            "kv",
            scale=(2 * width + 1) ** -0.5,  # of a sum of 2 * width + 1 terms
            token_taps=torch.cat([k_taps, v_taps], 1).unflatten(1, (-1, width)),
        )

    @property
    def _key_blocks(self) -> list[Block]:
        spec = self.spec
        return [(spec.num_kv_heads, width) for width in (spec.head_dim, self.conv_weight.shape[1])]


def _clipped(x: Tensor, longest: float) -> Tensor:
    """Scale down the heads of x [..., width] float32 whose norm exceeds ``longest``."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    clipped: Tensor = x * (longest / (norm + 1e-6)).clamp(max=1.0)
    return clipped
