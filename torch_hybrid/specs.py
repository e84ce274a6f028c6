"""Frozen facts about a model's layers, and the table that dispatch goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Full softmax attention over a paged KV pool.

    ``window`` is the number of visible keys, the query's own included (0: all of them);
    ``softcap`` bounds logits by ``softcap * tanh(logits / softcap)`` (0: no bound).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, "
                f"got {self.num_q_heads} and {self.num_kv_heads}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleSpec:
    """A gated-delta-rule mixer: causal convolution, recurrence, gated norm.

    ``beta_scale`` is 2 where negative eigenvalues are allowed and 1 elsewhere.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    activation: str = "silu"
    norm_eps: float = 1e-6
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
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


LayerSpec = AttentionSpec | DeltaRuleSpec

KINDS: dict[type, str] = {
    AttentionSpec: "paged_attention",
    DeltaRuleSpec: "gated_delta_rule",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """One layer: its kind, its dense index among the layers of that kind, and its facts."""

    kind: str
    index: int
    spec: LayerSpec


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Layer id to kind and dense pool index; resolved while tracing.

    Every model has its own table, a draft model too, with ids from 0.

    Raises:
        ValueError: the dense indices of a kind are not 0, 1, 2, ... in some order.
    """

    entries: tuple[LayerEntry, ...]

    @classmethod
    def from_specs(cls, specs: Sequence[LayerSpec]) -> LayerTable:
        """Number the layers of each kind in order of appearance."""
        counts: dict[str, int] = {}
        entries = []
        for spec in specs:
            kind = KINDS[type(spec)]
            index = counts.get(kind, 0)
            counts[kind] = index + 1
            entries.append(LayerEntry(kind=kind, index=index, spec=spec))
        return cls(tuple(entries))

    def __post_init__(self) -> None:
        for kind in self.kinds:
            indices = sorted(entry.index for entry in self.entries if entry.kind == kind)
            if indices != list(range(len(indices))):
                raise ValueError(
                    f"layer table is not a bijection: {kind} layers must have the indices "
                    f"{list(range(len(indices)))}, got {indices}"
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds in use, in order of first appearance."""
        return tuple(dict.fromkeys(entry.kind for entry in self.entries))

    def of_kind(self, kind: str) -> tuple[LayerEntry, ...]:
        """The entries of one kind, ordered by dense index."""
        chosen = [entry for entry in self.entries if entry.kind == kind]
        return tuple(sorted(chosen, key=lambda entry: entry.index))

    def __getitem__(self, layer_id: int) -> LayerEntry:
        return self.entries[layer_id]

    def __len__(self) -> int:
        return len(self.entries)


pytree.register_constant(LayerTable)
