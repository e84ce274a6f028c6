"""What the mixers of a layer must move and compute at the least, by their facts.

FLOPs of recurrences are those of the ops: token by token for a single token, and by chunks of
``CHUNK`` tokens, their triangular products counted whole, for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE as CHUNK
from torch_hybrid.specs import (
    AttentionSpec,
    BranchConvolutionSpec,
    ChannelMixSpec,
    ConvolvedProjectionSpec,
    DeltaRuleSpec,
    IndexedAttentionSpec,
    IndexedLatentSpec,
    KimiDeltaSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    MlstmSpec,
    NgramSpec,
    RgLruSpec,
    ShortConvolutionSpec,
    TimeMixSpec,
)

Indexed = IndexedAttentionSpec | IndexedLatentSpec


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step: its new tokens, and those that it held before."""

    num_new: int
    num_held: int

    @property
    def num_kept(self) -> int:
        """Tokens that it holds after the step."""
        return self.num_held + self.num_new

    def num_pairs(self, window: int = 0) -> float:
        """Pairs of a query and a key that it sees: of all keys before it, or of the last so many,
        its own included."""
        growing = min(self.num_new, max(0, window - self.num_held)) if window else self.num_new
        seen = growing * self.num_held + growing * (growing + 1) / 2
        return seen + (self.num_new - growing) * window

    def num_read(self, window: int = 0) -> int:
        """Keys that its queries see together."""
        return min(self.num_kept, window - 1 + self.num_new) if window else self.num_kept


def cache_bytes(spec: LayerSpec, row: Row, dtype: torch.dtype) -> int:
    """Bytes of what a mixer keeps, in a model of one dtype: states read and written, keys and
    values or latents that are seen read once."""
    window = spec.window if isinstance(spec, AttentionSpec) else 0
    times = {"slot": 2, "page": row.num_read(window)}
    pools = {name: pool for name, pool in spec.pools().items() if pool.per in times}
    seen = 0
    if isinstance(spec, Indexed):  # of keys and values, or of latents, a single token sees few
        num_seen = _num_seen(spec, row.num_kept - 1) if row.num_new == 1 else row.num_kept
        rows = "kv" if isinstance(spec, IndexedAttentionSpec) else "latents"
        seen = num_seen * pools.pop(rows).nbytes(dtype)
    return seen + sum(times[pool.per] * pool.nbytes(dtype) for pool in pools.values())


def _num_seen(spec: Indexed, position: int) -> int:
    """Keys that a query at a position sees."""
    complete = (position + 1) // spec.block_size
    left_out = max(0, complete - spec.top_k) * spec.block_size
    return position + 1 - left_out


def mixer_flops(spec: LayerSpec, row: Row) -> float:
    """FLOPs of a mixer beside its projections."""
    match spec:
        case AttentionSpec():
            return 4 * spec.num_q_heads * spec.head_dim * row.num_pairs(spec.window)
        case LatentSpec():
            return _latent_flops(spec, row)
        case RgLruSpec():  # a head's gates read its own channels
            return (4 * spec.head_dim + 2 * spec.conv_width) * spec.channels * row.num_new
        case TimeMixSpec() | ChannelMixSpec():  # the token before
            return 2 * spec.conv_width * spec.dim * row.num_new
        case ShortConvolutionSpec():
            return 2 * spec.conv_width * spec.channels * row.num_new
        case ConvolvedProjectionSpec():  # the second is a product of each head
            return 2 * spec.conv_width * spec.conv_channels * row.num_new
        case BranchConvolutionSpec():
            keys_and_values = 2 * spec.num_kv_heads * spec.head_dim
            return 2 * spec.conv_width * (keys_and_values + 2 * spec.channels) * row.num_new
        case IndexedAttentionSpec():
            attended = 4 * spec.num_q_heads * spec.head_dim * _num_attended(spec, row)
            return attended + _index_flops(spec, row)
        case IndexedLatentSpec():
            return _indexed_latent_flops(spec, row)
        case NgramSpec():
            return 0.0
        case MambaSpec():  # decay, update and read each state; exponentials count nothing
            return 5 * spec.channels * spec.state_dim * row.num_new
        case _:
            one_token = row.num_new == 1
            return _token_flops(spec) if one_token else row.num_new * _chunk_flops(spec) / CHUNK


def _num_attended(spec: Indexed, row: Row) -> int:
    """Pairs of a query and a key that it sees."""
    return sum(_num_seen(spec, position) for position in range(row.num_held, row.num_kept))


def _index_flops(spec: Indexed, row: Row) -> float:
    """Scores of the blocks before each query."""
    return 2 * spec.num_index_heads * spec.index_dim * row.num_pairs() / spec.block_size


def _indexed_latent_flops(spec: IndexedLatentSpec, row: Row) -> float:
    """The indexer's, and the cheaper of both forms, as of other latents."""
    attended, head = _num_attended(spec, row), spec.nope_dim + spec.v_dim
    absorbed = 4 * spec.latent_rank * attended
    expanded = 2 * head * attended + 2 * spec.latent_rank * head * row.num_held
    return spec.num_heads * min(absorbed, expanded) + _index_flops(spec, row)


def _latent_flops(spec: LatentSpec, row: Row) -> float:
    """The cheaper of both forms. The projection of the new tokens' latents, or of their queries
    and outputs, is a linear layer of the model; that of the latents held before is not."""
    absorbed = 2 * (2 * spec.latent_rank + spec.rope_dim) * row.num_pairs()
    expanded = 2 * (spec.qk_dim + spec.v_dim) * row.num_pairs()
    expanded += 2 * spec.latent_rank * (spec.nope_dim + spec.v_dim) * row.num_held
    return spec.num_heads * min(absorbed, expanded)


def _token_flops(spec: LayerSpec) -> float:
    """Decay, update and read a state; a delta rule reads it once more for its error."""
    per_element = 7 if isinstance(spec, DeltaRuleSpec | KimiDeltaSpec) else 5
    return per_element * math.prod(spec.state_shape)


def _chunk_flops(spec: LayerSpec) -> float:
    c = CHUNK
    heads, v, k = spec.state_shape
    match spec:
        case DeltaRuleSpec() | KimiDeltaSpec():
            return heads * (6 * c * k * v + 2 * c * c * (3 * k + 2 * v) + 2 / 3 * c**3)
        case Mamba2Spec():  # q k^T once for the heads of a group
            return heads * (4 * c * k * v + 2 * c * c * v) + spec.num_groups * 2 * c * c * k
        case LightningSpec() | MlstmSpec():
            return heads * (4 * c * k * v + 2 * c * c * (k + v))


def inner_width(spec: LayerSpec) -> int:
    """Elements of a token that a mixer's inner tensors hold at once: its projections, their
    convolution, its gates and its output."""
    match spec:
        case AttentionSpec():  # query, its gate, key, value, output, biases
            width = (3 * spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim
            return width + spec.num_q_heads * spec.reach
        case IndexedAttentionSpec():  # and the indexer's queries and keys
            width = (3 * spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim
            return width + 2 * spec.num_index_heads * spec.index_dim + 2 * spec.conv_channels
        case IndexedLatentSpec():  # queries and outputs are latents in between
            width = spec.num_heads * (spec.nope_dim + 2 * spec.latent_rank + spec.v_dim)
            indexer = (spec.num_index_heads + 3) * spec.index_dim
            return spec.latent_rank + width + indexer
        case NgramSpec():  # keys, the streams, what enters them and its convolution
            return 4 * spec.channels
        case LatentSpec():  # latent, and expanded: query, key, value, output
            return spec.row_dim + 2 * spec.num_heads * (spec.qk_dim + spec.v_dim)
        case DeltaRuleSpec():  # and the decays and betas
            return 2 * (spec.conv_channels + spec.v_channels + spec.num_v_heads)
        case KimiDeltaSpec():  # a decay for each channel of a key
            width = 2 * (spec.conv_channels + spec.v_channels)
            return width + spec.k_channels + spec.num_heads
        case Mamba2Spec():  # and the steps and decays
            return 2 * (spec.conv_channels + spec.inner_dim + spec.num_heads)
        case MambaSpec():  # x before and after its convolution, gate, steps, output
            return 5 * spec.channels + spec.dt_rank + 2 * spec.state_dim
        case LightningSpec():  # query, key, value, gate, output
            return 5 * spec.channels
        case MlstmSpec():  # query, key, value and what stands beside it, gate, output
            return 2 * spec.k_channels + 4 * spec.v_channels + 2 * spec.num_heads
        case RgLruSpec():  # input, its convolution, two gates, that of the output, output
            return 6 * spec.channels
        case TimeMixSpec():  # the token before, three mixes; key, value, gate, mean
            return 4 * spec.dim + 4 * spec.channels
        case ChannelMixSpec():  # the token before, two mixes, gate; units
            return 4 * spec.dim + 2 * spec.width
        case ConvolvedProjectionSpec():  # projections, taps, their convolution, what comes of them
            heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
            return 2 * spec.conv_channels + heads * spec.head_dim
        case ShortConvolutionSpec():  # input, its gate, that of the output, output
            return 4 * spec.channels
        case BranchConvolutionSpec():  # inputs and outputs
            return 4 * (spec.num_kv_heads * spec.head_dim + spec.channels)
