"""Embeddings of n-grams that enter the residual streams of a layer."""

from __future__ import annotations

import math

from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan, convolve, run_rule
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.ops.ngram_embedding import ngram_embedding
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import NgramSpec


class NgramEmbedding(nn.Module):
    """Embedding of each token's n-grams, gated for each residual stream, then convolved.

    Hashes of n-grams select rows of a table. The rows are projected to a value, and to a key for
    each residual stream. The product of key and stream gates the value for that stream. A causal
    convolution of the gated values is added to them.

    Args:
        spec: the mixer's facts.
        table: [rows, dim], rows of all heads.
        multipliers, head_sizes, head_offsets: hashes, as ``ngram_embedding`` takes them.
        eos: the token that ends a text; no n-gram reaches across it.
        key_proj, value_proj: projections of the rows of all heads, side by side.
        key_norm, stream_norm, conv_norm: norms of each stream by itself, in [..., channels].
        conv_weight: [channels, conv_width].
    """

    def __init__(
        self,
        spec: NgramSpec,
        *,
        table: nn.Parameter,
        multipliers: Tensor,
        head_sizes: Tensor,
        head_offsets: Tensor,
        eos: int,
        key_proj: nn.Linear,
        value_proj: nn.Linear,
        key_norm: nn.Module,
        stream_norm: nn.Module,
        conv_norm: nn.Module,
        conv_weight: nn.Parameter,
    ) -> None:
        super().__init__()
        self.spec, self.eos = spec, eos
        self.table, self.conv_weight = table, conv_weight
        self.multipliers = nn.Buffer(multipliers)
        self.head_sizes, self.head_offsets = nn.Buffer(head_sizes), nn.Buffer(head_offsets)
        self.key_proj, self.value_proj = key_proj, value_proj
        self.key_norm, self.stream_norm, self.conv_norm = key_norm, stream_norm, conv_norm

    @in_own_dtype(1)
    def forward(
        self, streams: Tensor, tokens: Tensor, plan: RecurrentPlan, cache: LayerCache
    ) -> Tensor:
        """Compute what to add to the residual streams.

        Args:
            streams: [T, channels], the sequences packed as ``plan`` says.
            tokens: [T] int64.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the slots that the plan names.

        Returns:
            [T, channels].
        """
        rows = run_rule(
            ngram_embedding,
            (tokens,),
            (self.table, self.multipliers, self.head_sizes, self.head_offsets, cache["tokens"]),
            plan,
            cache,
            options={"eos": self.eos},
        )
        value = self.value_proj(rows)[:, None]
        width = value.shape[-1]
        keys = self.key_norm(self.key_proj(rows)) * self.stream_norm(streams)
        gate = keys.unflatten(-1, (-1, width)).sum(-1, keepdim=True) / math.sqrt(width)
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        entering = (gate.sigmoid() * value).flatten(1)
        mixed = convolve(
            self.conv_norm(entering),
            self.conv_weight,
            None,
            plan,
            cache,
            activation="silu",
        )
        out: Tensor = entering + mixed
        return out

    def shard(self, ranks: Ranks) -> NgramEmbedding:
        """Return this layer itself: every rank has whole residual streams."""
        return self
