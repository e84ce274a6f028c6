"""Frozen facts about a model's layers, and the table that dispatch goes by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import torch

from torch_hybrid.ops import fp8_kv
from torch_hybrid.pytrees import register_constant
from torch_hybrid.ranks import divide, divide_or_repeat

LayerFamily = Literal["full", "linear"]


@dataclass(frozen=True, slots=True)
class Pool:
    """One tensor that a layer keeps between steps.

    ``shape`` is what a sequence has in it (``per="slot"``), or a token (``per="page"``, of
    ``page_size`` tokens each), or each draft of a sequence (``per="draft"``; there is no such
    tensor where nothing is drafted), or all of them together (``per="layer"``). With ``tokens``, so
    many tokens of a page share one. ``planes`` of them stand one after the other in one tensor;
    with 0, it has no such dimension. ``dtype`` None is the model's. ``fill`` is what a new one
    holds.
    """

    shape: tuple[int, ...]
    per: Literal["slot", "page", "draft", "layer"]
    dtype: torch.dtype | None = None
    planes: int = 0
    fill: float = 0.0
    tokens: int = 1

    def nbytes(self, model_dtype: torch.dtype) -> int:
        """Bytes that a sequence, a token (rounded up), a draft or the layer takes."""
        numbers = math.prod(self.shape) * max(self.planes, 1)
        return -(-numbers * (self.dtype or model_dtype).itemsize // self.tokens)


class LayerSpec(Protocol):
    """The facts of one mixer: a frozen dataclass, which can be hashed.

    ``kind`` names all mixers that one backend plans. ``family`` is "full" where a token costs more
    the more its sequence holds, and "linear" where it always costs the same.
    """

    kind: ClassVar[str]
    family: ClassVar[LayerFamily]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def pools(self) -> Mapping[str, Pool]:
        """What the mixer keeps, by name; it is handed a tensor for each."""
        ...

    def divided(self, num_ranks: int) -> Self:
        """What each of ``num_ranks`` ranks holds.

        Raises:
            UnsupportedError: the heads cannot be spread so.
        """
        ...


SCALES = "scales"  # by this name, what numbers of 8 bits in a layer's other pool are worth


def _scales(kv_dtype: torch.dtype | None, shape: tuple[int, ...]) -> dict[str, Pool]:
    """What numbers of 8 bits are worth, 1 until it is set; nothing for other dtypes."""
    if kv_dtype != fp8_kv.DTYPE:
        return {}
    return {SCALES: Pool(shape, per="layer", dtype=torch.float32, fill=1.0)}


def _conv_and_state(width: int, channels: int, state_shape: tuple[int, ...]) -> dict[str, Pool]:
    """The last inputs of a convolution, oldest first, and a recurrent state."""
    conv = Pool((width - 1, channels), per="slot")
    return {"conv": conv, "state": Pool(state_shape, per="slot", dtype=torch.float32)}


def _records(convolved: int, width: int) -> dict[str, Pool]:
    """Of drafts: inputs of a convolution, and those of what comes after it."""
    widths = {RECORDS: convolved, STATE_RECORDS: width}
    return {name: Pool((width,), per="draft") for name, width in widths.items()}


MOST_GATE_SOFTCAP = 40.0  # of exponential gates: float32 holds sums of what e^40 weighs
KEPT_HIDDEN = 128  # last tokens whose hidden states are kept for a head that drafts
# By these names, the inputs of tokens that are not certain (``ops.verify``): of a layer's op or of
# its convolution, and of what comes after that.
RECORDS, STATE_RECORDS = "records", "state_records"


def _check_groups(num_q_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}"
        )


def _divided_heads(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> dict[str, Any]:
    """A rank's part of query heads, and of the key heads that they share."""
    return {
        "num_q_heads": divide("num_q_heads", num_q_heads, num_ranks),
        "num_kv_heads": divide_or_repeat("num_kv_heads", num_kv_heads, num_ranks),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Full softmax attention over a paged KV pool.

    ``window`` is the number of visible keys, the query's own included (0: all of them);
    ``softcap`` bounds logits by ``softcap * tanh(logits / softcap)`` (0: no bound). ``reach`` is at
    how many distances, from 0 on, a key's logit has a bias of its query and head (0: at none).
    ``sinks`` says whether a query has one more logit, of no key: then the log-sum-exp of the others
    is asked for. ``kv_dtype`` is that of kept keys and values (None: the model's).
    """

    kind: ClassVar[str] = "paged_attention"
    family: ClassVar[LayerFamily] = "full"

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    reach: int = 0
    sinks: bool = False
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_groups(self.num_q_heads, self.num_kv_heads)

    def pools(self) -> dict[str, Pool]:
        """Keys and values, in one tensor: an op may mutate one argument per storage in place."""
        heads = (self.num_kv_heads, self.head_dim)
        kv = Pool(heads, per="page", dtype=self.kv_dtype, planes=2)
        return {"kv": kv, **_scales(self.kv_dtype, (2, self.num_kv_heads))}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(self, **_divided_heads(self.num_q_heads, self.num_kv_heads, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedAttentionSpec:
    """Softmax attention over the blocks of past tokens that an indexer picks for each query.

    A block is ``block_size`` tokens; a query sees ``top_k`` blocks and the tokens after the last
    that is complete. A block's index key, ``index_dim`` wide, is the mean of its tokens', normed
    with ``norm_eps`` and rotated in its first ``rope_dim`` dims as at its first token.
    """

    kind: ClassVar[str] = "indexed_attention"
    family: ClassVar[LayerFamily] = "full"

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    num_index_heads: int
    index_dim: int
    rope_dim: int
    block_size: int
    top_k: int

    def __post_init__(self) -> None:
        _check_groups(self.num_q_heads, self.num_kv_heads)

    @property
    def conv_width(self) -> int:
        """Of the convolution that takes the mean over a block."""
        return self.block_size

    @property
    def conv_channels(self) -> int:
        """Width of ``[index key | cosines | sines]`` of a token."""
        return self.index_dim + self.rope_dim

    def pools(self) -> dict[str, Pool]:
        """Keys and values, a key for each block, and the last tokens' parts of the next block, and
        drafts'."""
        return {
            "kv": Pool((self.num_kv_heads, self.head_dim), per="page", planes=2),
            "block_keys": Pool((self.index_dim,), per="page", tokens=self.block_size),
            "conv": Pool((self.block_size - 1, self.conv_channels), per="slot"),
            RECORDS: Pool((self.conv_channels,), per="draft"),
        }

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: some of the heads, and all of the indexer."""
        return replace(self, **_divided_heads(self.num_q_heads, self.num_kv_heads, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpec:
    """Embeddings of the n-grams up to ``ngram_size`` that end at each token, let in by gates, and a
    convolution over them, all of it for each of the residual streams.

    ``channels`` is the width of all streams together; of the convolution's ``conv_width`` taps,
    every ``ngram_size``-th counts, the last one first.
    """

    kind: ClassVar[str] = "ngram_embedding"
    family: ClassVar[LayerFamily] = "linear"

    ngram_size: int
    channels: int
    conv_width: int

    def pools(self) -> dict[str, Pool]:
        """The last tokens, the convolution's last inputs, and both of drafts."""
        return {
            "tokens": Pool((self.ngram_size - 1,), per="slot", dtype=torch.int64),
            "conv": Pool((self.conv_width - 1, self.channels), per="slot"),
            RECORDS: Pool((self.channels,), per="draft"),
            STATE_RECORDS: Pool((1,), per="draft", dtype=torch.int64),
        }

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: all of it on every rank."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleSpec:
    """A gated-delta-rule mixer: causal convolution, recurrence, gated norm.

    ``beta_scale`` is 2 where negative eigenvalues are allowed and 1 elsewhere. ``gate`` is the
    activation of what the norm's output is multiplied by, "silu" or "sigmoid".
    """

    kind: ClassVar[str] = "gated_delta_rule"
    family: ClassVar[LayerFamily] = "linear"

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    activation: str = "silu"
    norm_eps: float = 1e-6
    beta_scale: float = 1.0
    gate: str = "silu"

    def __post_init__(self) -> None:
        if self.gate not in ("silu", "sigmoid"):
            raise ValueError(f"gate must be 'silu' or 'sigmoid', got {self.gate!r}")
        if self.num_k_heads < 1 or self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_k_heads, "
                f"got {self.num_v_heads} and {self.num_k_heads}"
            )

    @property
    def k_channels(self) -> int:
        """Width of q and of k: heads times head dim."""
        return self.num_k_heads * self.head_k_dim

    @property
    def v_channels(self) -> int:
        """Width of v and of the output gate."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_channels(self) -> int:
        """Width of ``[q | k | v]``, what the convolution mixes."""
        return 2 * self.k_channels + self.v_channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, values, keys."""
        return self.num_v_heads, self.head_v_dim, self.head_k_dim

    def pools(self) -> dict[str, Pool]:
        """The convolution's last inputs, the state, and records ``[q | k | v | b | a]`` of drafts,
        each in a storage of its own."""
        width = self.conv_channels + 2 * self.num_v_heads
        pools = _conv_and_state(self.conv_width, self.conv_channels, self.state_shape)
        return {**pools, RECORDS: Pool((width,), per="draft")}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(
            self,
            num_k_heads=divide_or_repeat("num_k_heads", self.num_k_heads, num_ranks),
            num_v_heads=divide("num_v_heads", self.num_v_heads, num_ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec:
    """A Kimi-delta-attention mixer: convolution, delta rule with a decay per channel, gated norm.

    ``gate_lower_bound`` is the bounded form's least log decay of a token (Ling-3); None is the
    softplus form, which has no bound.
    """

    kind: ClassVar[str] = "kimi_delta_attention"
    family: ClassVar[LayerFamily] = "linear"

    num_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    activation: str = "silu"
    norm_eps: float = 1e-6
    gate_lower_bound: float | None = None

    @property
    def k_channels(self) -> int:
        """Width of q and of k."""
        return self.num_heads * self.head_k_dim

    @property
    def v_channels(self) -> int:
        """Width of v and of the output gate."""
        return self.num_heads * self.head_v_dim

    @property
    def conv_channels(self) -> int:
        """Width of ``[q | k | v]``, what the convolution mixes."""
        return 2 * self.k_channels + self.v_channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, values, keys."""
        return self.num_heads, self.head_v_dim, self.head_k_dim

    def pools(self) -> dict[str, Pool]:
        """The convolution's last inputs, the state, and records ``[q | k | v | b | f]`` of drafts,
        each in a storage of its own."""
        width = self.conv_channels + self.num_heads + self.k_channels
        pools = _conv_and_state(self.conv_width, self.conv_channels, self.state_shape)
        return {**pools, RECORDS: Pool((width,), per="draft")}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(self, num_heads=divide("num_heads", self.num_heads, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """A Mamba2 mixer: convolution, scalar-decay recurrence, gate with or without a norm.

    ``dt_min`` and ``dt_max`` bound the step size after its softplus. ``gate`` says where the gate
    stands: "before_norm", "after_norm", or "no_norm". The norm's groups are ``norm_groups`` equal
    parts of the inner width.
    """

    kind: ClassVar[str] = "mamba2"
    family: ClassVar[LayerFamily] = "linear"

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    activation: str = "silu"
    dt_min: float = 0.0
    dt_max: float = float("inf")
    gate: str = "before_norm"
    norm_groups: int = 1
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads must be a multiple of num_groups, "
                f"got {self.num_heads} and {self.num_groups}"
            )
        if self.gate not in ("before_norm", "after_norm", "no_norm"):
            raise ValueError(
                f"gate must be 'before_norm', 'after_norm' or 'no_norm', got {self.gate!r}"
            )

    @property
    def inner_dim(self) -> int:
        """Width of x and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Width of ``[x | B | C]``, what the convolution mixes."""
        return self.inner_dim + 2 * self.num_groups * self.state_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, values, keys."""
        return self.num_heads, self.head_dim, self.state_dim

    def pools(self) -> dict[str, Pool]:
        """The convolution's last inputs, the state, and records ``[x | B | C | dt]`` of drafts,
        each in a storage of its own."""
        width = self.conv_channels + self.num_heads
        pools = _conv_and_state(self.conv_width, self.conv_channels, self.state_shape)
        return {**pools, RECORDS: Pool((width,), per="draft")}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(
            self,
            num_heads=divide("num_heads", self.num_heads, num_ranks),
            num_groups=divide_or_repeat("num_groups", self.num_groups, num_ranks),
            norm_groups=divide_or_repeat("norm_groups", self.norm_groups, num_ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """A Mamba mixer, of the first kind: convolution, selective scan, gate.

    ``dt_rank`` is the width of what step sizes are projected from. It, B and C are normed where
    ``norm_eps`` is set. Each of ``num_heads`` equal parts of the channels has its own.
    """

    kind: ClassVar[str] = "mamba"
    family: ClassVar[LayerFamily] = "linear"

    channels: int
    state_dim: int
    dt_rank: int
    conv_width: int
    activation: str = "silu"
    norm_eps: float | None = None
    num_heads: int = 1

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.channels % self.num_heads:
            raise ValueError(
                f"channels must be a multiple of num_heads, got {self.channels} and "
                f"{self.num_heads}"
            )

    def pools(self) -> dict[str, Pool]:
        """The convolution's last inputs and the state, each in a storage of its own, and records of
        drafts: what is convolved, and ``[x | dt | B]`` of the scan."""
        pools = _conv_and_state(self.conv_width, self.channels, (self.channels, self.state_dim))
        width = 2 * self.channels + self.num_heads * self.state_dim
        return {**pools, **_records(self.channels, width)}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: some of several heads, or some channels of one."""
        heads = self.num_heads
        return replace(
            self,
            num_heads=heads if heads == 1 else divide("num_heads", heads, num_ranks),
            channels=divide("channels", self.channels, num_ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec:
    """A lightning-attention mixer: linear attention with one fixed decay for each head, gated norm.

    ``activation`` ("none" or "silu") is that of q, k and v. Where ``qk_norm`` is set, q and k are
    normed per head. The output norm's groups are ``norm_groups`` equal parts of its width.
    """

    kind: ClassVar[str] = "lightning_attention"
    family: ClassVar[LayerFamily] = "linear"

    num_heads: int
    head_dim: int
    scale: float = 1.0
    activation: str = "none"
    qk_norm: bool = False
    norm_groups: int = 1
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.activation not in ("none", "silu"):
            raise ValueError(f"activation must be 'none' or 'silu', got {self.activation!r}")
        if self.norm_groups < 1 or self.channels % self.norm_groups:
            raise ValueError(
                f"norm_groups must divide the {self.channels} channels, got {self.norm_groups}"
            )

    @property
    def channels(self) -> int:
        """Width of q, of k, of v and of the output gate."""
        return self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, values, keys."""
        return self.num_heads, self.head_dim, self.head_dim

    def pools(self) -> dict[str, Pool]:
        """The state, and k and v as it takes them of tokens that are not certain."""
        return {
            "state": Pool(self.state_shape, per="slot", dtype=torch.float32),
            RECORDS: Pool((2 * self.channels,), per="draft", dtype=torch.float32),
        }

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(
            self,
            num_heads=divide("num_heads", self.num_heads, num_ranks),
            norm_groups=divide_or_repeat("norm_groups", self.norm_groups, num_ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlstmSpec:
    """An mLSTM mixer: a matrix memory with exponential gates, normed per head.

    Gates are bounded by ``gate_softcap * tanh(gates / gate_softcap)`` before they act.
    """

    kind: ClassVar[str] = "mlstm"
    family: ClassVar[LayerFamily] = "linear"

    num_heads: int
    head_k_dim: int
    head_v_dim: int
    gate_softcap: float
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 < self.gate_softcap <= MOST_GATE_SOFTCAP:
            raise ValueError(
                f"gate_softcap must be above 0 and at most {MOST_GATE_SOFTCAP}, "
                f"got {self.gate_softcap}"
            )

    @property
    def k_channels(self) -> int:
        """Width of q and of k."""
        return self.num_heads * self.head_k_dim

    @property
    def v_channels(self) -> int:
        """Width of v and of the output gate."""
        return self.num_heads * self.head_v_dim

    @property
    def memory_dim(self) -> int:
        """Values of a head and, after them, ones, of which the memory is the normalizer: as many as
        bring the next head to a multiple of 16."""
        return (self.head_v_dim // 16 + 1) * 16

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, values, keys."""
        return self.num_heads, self.memory_dim, self.head_k_dim

    def pools(self) -> dict[str, Pool]:
        """The memory, and records ``[k | v | gates]`` of drafts."""
        width = self.k_channels + self.v_channels + 2 * self.num_heads
        return {
            "state": Pool(self.state_shape, per="slot", dtype=torch.float32),
            RECORDS: Pool((width,), per="draft"),
        }

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(self, num_heads=divide("num_heads", self.num_heads, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionSpec:
    """A gated short convolution: a mixer that keeps its last inputs, and has no recurrence."""

    kind: ClassVar[str] = "short_convolution"
    family: ClassVar[LayerFamily] = "linear"

    channels: int
    conv_width: int

    def pools(self) -> dict[str, Pool]:
        """The last inputs of the convolution, their gates applied, and those of drafts."""
        conv = Pool((self.conv_width - 1, self.channels), per="slot")
        return {"conv": conv, RECORDS: Pool((self.channels,), per="draft")}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(self, channels=divide("channels", self.channels, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedProjectionSpec:
    """Queries and keys that are convolved twice, and values half of whose channels are those of the
    token before.

    The first convolution, ``channel_width`` wide, is of each channel by itself, the second,
    ``head_width`` wide, of the channels of a head. What is kept are inputs of the first, once for
    each token of which the second reads an output.
    """

    kind: ClassVar[str] = "convolved_projection"
    family: ClassVar[LayerFamily] = "linear"

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    channel_width: int
    head_width: int

    def __post_init__(self) -> None:
        _check_groups(self.num_q_heads, self.num_kv_heads)

    @property
    def num_heads(self) -> int:
        """Of queries and of keys together."""
        return self.num_q_heads + self.num_kv_heads

    @property
    def conv_width(self) -> int:
        """Tokens that one sees of both convolutions, or of the delay of values."""
        return max(self.channel_width + self.head_width - 1, 2)

    @property
    def conv_channels(self) -> int:
        """Width of ``[what the second convolution reads of each head | v]``."""
        return (self.num_heads * self.head_width + self.num_kv_heads) * self.head_dim

    def pools(self) -> dict[str, Pool]:
        """The last inputs of the convolutions and of the delay, and those of drafts."""
        conv = Pool((self.conv_width - 1, self.conv_channels), per="slot")
        return {"conv": conv, RECORDS: Pool((self.conv_channels,), per="draft")}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(self, **_divided_heads(self.num_q_heads, self.num_kv_heads, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchConvolutionSpec:
    """Causal convolutions of a layer's keys and values, and of what its attention and its
    feed-forward are about to add to the residual, ``channels`` wide."""

    kind: ClassVar[str] = "branch_convolution"
    family: ClassVar[LayerFamily] = "linear"

    num_kv_heads: int
    head_dim: int
    channels: int
    conv_width: int

    def pools(self) -> dict[str, Pool]:
        """The last inputs of each, those of keys and values side by side, and those of drafts."""
        widths = {
            "kv": 2 * self.num_kv_heads * self.head_dim,
            "attention": self.channels,
            "feed_forward": self.channels,
        }
        pools = {}
        for name, width in widths.items():
            pools[name] = Pool((self.conv_width - 1, width), per="slot")
            pools[f"{name}_{RECORDS}"] = Pool((width,), per="draft")
        return pools

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: some of the keys and values, and all of the branches."""
        num_kv_heads = divide_or_repeat("num_kv_heads", self.num_kv_heads, num_ranks)
        return replace(self, num_kv_heads=num_kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousHiddenSpec:
    """What a head that predicts further tokens reads: each token beside the model's hidden state of
    the token before it, ``channels`` wide."""

    kind: ClassVar[str] = "previous_hidden"
    family: ClassVar[LayerFamily] = "linear"

    channels: int

    def pools(self) -> dict[str, Pool]:
        """The last tokens and their hidden states: the head reads them when it is to draft."""
        return {
            "hidden": Pool((KEPT_HIDDEN, self.channels), per="slot"),
            "tokens": Pool((KEPT_HIDDEN,), per="slot", dtype=torch.int64),
        }

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: all of it on every rank."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruSpec:
    """A mixer of real-gated linear recurrent units: convolution, recurrence, gate.

    The recurrence's gates read the channels of their own head.
    """

    kind: ClassVar[str] = "rg_lru"
    family: ClassVar[LayerFamily] = "linear"

    num_heads: int
    head_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Width of the convolution, of the state and of the output gate."""
        return self.num_heads * self.head_dim

    def pools(self) -> dict[str, Pool]:
        """The convolution's last inputs, a state of one number per channel, and records of drafts:
        what is convolved, and ``[x | gates]`` of the recurrence."""
        pools = _conv_and_state(self.conv_width, self.channels, (self.channels,))
        return {**pools, **_records(self.channels, 3 * self.channels)}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says."""
        return replace(self, num_heads=divide("num_heads", self.num_heads, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (MLA): keys and values of all heads from one latent row.

    A row holds ``latent_rank`` normed latents and ``rope_dim`` shared key dims, rotated or not.
    ``kv_dtype`` is that of kept rows (None: the model's).
    """

    kind: ClassVar[str] = "latent_attention"
    family: ClassVar[LayerFamily] = "full"

    num_heads: int
    latent_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    kv_dtype: torch.dtype | None = None

    @property
    def row_dim(self) -> int:
        """Width of a cached row."""
        return self.latent_rank + self.rope_dim

    @property
    def qk_dim(self) -> int:
        """Width of an expanded query and key head."""
        return self.nope_dim + self.rope_dim

    def pools(self) -> dict[str, Pool]:
        """Rows ``[latent | shared key]``."""
        latents = Pool((self.row_dim,), per="page", dtype=self.kv_dtype)
        return {"latents": latents, **_scales(self.kv_dtype, (1,))}

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: some of the heads, and all of the latents."""
        return replace(self, num_heads=divide("num_heads", self.num_heads, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedLatentSpec:
    """MLA without rotation, over the blocks of past tokens that an indexer picks for each query.

    A row holds ``latent_rank`` normed latents. A block is ``block_size`` tokens; a query sees
    ``top_k`` blocks and the tokens after the last that is complete. A block's index key,
    ``index_dim`` wide, is a mean of its tokens', weighed by gates.
    """

    kind: ClassVar[str] = "indexed_latent_attention"
    family: ClassVar[LayerFamily] = "full"

    num_heads: int
    latent_rank: int
    nope_dim: int
    v_dim: int
    scale: float
    num_index_heads: int
    index_dim: int
    block_size: int
    top_k: int

    @property
    def head_dim(self) -> int:
        """Width of what queries meet: a latent."""
        return self.latent_rank

    def pools(self) -> dict[str, Pool]:
        """Latents, a key for each block, and keys and gates of the tokens of the next block, and of
        drafts."""
        return {
            "latents": Pool((self.latent_rank,), per="page"),
            "block_keys": Pool((self.index_dim,), per="page", tokens=self.block_size),
            "unpooled": Pool((self.block_size - 1, 2, self.index_dim), per="slot"),
            RECORDS: Pool((2 * self.index_dim,), per="draft"),
        }

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: some of the heads, all of the latents and of the indexer."""
        return replace(self, num_heads=divide("num_heads", self.num_heads, num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """One mixer: its dense index among the mixers of its kind, and its facts."""

    index: int
    spec: LayerSpec

    @property
    def kind(self) -> str:
        """As the spec says."""
        return self.spec.kind


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Layer id to the layer's mixers, with their kinds and dense pool indices.

    Most layers have one mixer; one of a model that has attention and a recurrence side by side
    has two, of different kinds, and one of feed-forward alone has none. The table is resolved
    while tracing. Every model has its own table, a draft model too, with ids from 0; the layers of
    a model's head that drafts come after the model's own, with pools of their own.

    Raises:
        ValueError: the dense indices of a kind are not 0, 1, 2, ... in some order, or a layer has
            two mixers of one kind.
    """

    layers: tuple[tuple[LayerEntry, ...], ...]

    @classmethod
    def from_specs(cls, specs: Sequence[LayerSpec | tuple[LayerSpec, ...]]) -> LayerTable:
        """Number the mixers of each kind in order of appearance.

        ``specs`` has for each layer the facts of its mixer, or a tuple of them for none or several.
        """
        counts: Counter[str] = Counter()

        def entry(spec: LayerSpec) -> LayerEntry:
            counts[spec.kind] += 1
            return LayerEntry(index=counts[spec.kind] - 1, spec=spec)

        mixers = (spec if type(spec) is tuple else (spec,) for spec in specs)
        return cls(tuple(tuple(map(entry, layer)) for layer in mixers))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for kind in self.kinds:
            indices = sorted(entry.index for entry in self.entries if entry.kind == kind)
            if indices != list(range(len(indices))):
                raise ValueError(
                    f"layer table is not a bijection: {kind} layers must have the indices "
                    f"{list(range(len(indices)))}, got {indices}"
                )
        for layer_id, layer in enumerate(self.layers):
            kinds = [entry.kind for entry in layer]
            if len(set(kinds)) != len(kinds):
                raise ValueError(f"layer {layer_id} must have one mixer of a kind, got {kinds}")

    @property
    def entries(self) -> tuple[LayerEntry, ...]:
        """All mixers, layer by layer."""
        return tuple(entry for layer in self.layers for entry in layer)

    @property
    def has_states(self) -> bool:
        """Whether a mixer keeps something of each sequence, whatever its length."""
        pools = (pool for entry in self.entries for pool in entry.spec.pools().values())
        return any(pool.per == "slot" for pool in pools)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds in use, in order of first appearance."""
        return tuple(dict.fromkeys(entry.kind for entry in self.entries))

    def of_kind(self, kind: str) -> tuple[LayerEntry, ...]:
        """The entries of one kind, ordered by dense index."""
        chosen = [entry for entry in self.entries if entry.kind == kind]
        return tuple(sorted(chosen, key=lambda entry: entry.index))

    def find(self, layer_id: int, *kinds: str) -> LayerEntry:
        """The mixer of one layer that is of one of ``kinds``.

        Raises:
            ValueError: the layer has none of them.
        """
        for entry in self.layers[layer_id]:
            if entry.kind in kinds:
                return entry
        own = [entry.kind for entry in self.layers[layer_id]]
        raise ValueError(f"layer {layer_id} has no {' or '.join(kinds)}, it has {own}")

    def __getitem__(self, layer_id: int) -> LayerEntry:
        """The mixer of a layer that has one, and no other.

        Raises:
            ValueError: it has none, or several.
        """
        if len(self.layers[layer_id]) != 1:
            kinds = [entry.kind for entry in self.layers[layer_id]]
            raise ValueError(f"layer {layer_id} must have one mixer, it has {kinds}")
        return self.layers[layer_id][0]

    def __len__(self) -> int:
        return len(self.layers)

    def keeping(self, kv_dtype: torch.dtype | None) -> LayerTable:
        """The table with keys, values and latents kept in ``kv_dtype``; None is the model's."""

        def kept(entry: LayerEntry) -> LayerEntry:
            match entry.spec:
                case AttentionSpec() | LatentSpec() as spec:
                    return replace(entry, spec=replace(spec, kv_dtype=kv_dtype))
            return entry

        return LayerTable(tuple(tuple(map(kept, layer)) for layer in self.layers))

    def divided(self, num_ranks: int) -> LayerTable:
        """The table of what each of ``num_ranks`` ranks holds.

        Raises:
            UnsupportedError: the heads of a mixer cannot be spread so.
        """
        return LayerTable(
            tuple(
                tuple(replace(entry, spec=entry.spec.divided(num_ranks)) for entry in layer)
                for layer in self.layers
            )
        )


register_constant(
    LayerTable,
    LayerEntry,
    AttentionSpec,
    IndexedAttentionSpec,
    NgramSpec,
    LatentSpec,
    IndexedLatentSpec,
    DeltaRuleSpec,
    KimiDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    LightningSpec,
    MlstmSpec,
    ShortConvolutionSpec,
    ConvolvedProjectionSpec,
    BranchConvolutionSpec,
    RgLruSpec,
    PreviousHiddenSpec,
)
