"""Layer table: the mixers of each layer, which dispatch looks up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torch_hybrid.pytrees import register_constant, register_part
from torch_hybrid.specs.full_attention import AttentionSpec, LatentSpec
from torch_hybrid.specs.layer import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """One mixer: its dense index among the mixers of its kind, and its spec."""

    index: int
    spec: LayerSpec

    @property
    def kind(self) -> str:
        """Kind of the spec."""
        return self.spec.kind


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Mixers of each layer by layer id, with their kinds and dense pool indices.

    Most layers have one mixer. A layer with attention and a recurrence side by side has two, of
    different kinds; a layer of feed-forward alone has none. The table is resolved while tracing.
    Every model has its own table, a draft model too, with ids from 0. The layers of a model's
    drafting head come after the model's own, with pools of their own.

    Raises:
        ValueError: the dense indices of a kind are not 0, 1, 2, ... in some order, or a layer has
            two mixers of one kind.
    """

    layers: tuple[tuple[LayerEntry, ...], ...]

    @classmethod
    def from_specs(cls, specs: Sequence[LayerSpec | tuple[LayerSpec, ...]]) -> LayerTable:
        """Number the mixers of each kind in order of appearance.

        ``specs`` has the spec of each layer's mixer, or a tuple of specs for none or several.
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
        """True if any mixer keeps a state per sequence."""
        pools = (pool for entry in self.entries for pool in entry.spec.pools().values())
        return any(pool.per == "slot" for pool in pools)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds in use, in order of first appearance."""
        return tuple(dict.fromkeys(entry.kind for entry in self.entries))

    def of_kind(self, kind: str) -> tuple[LayerEntry, ...]:
        """List the entries of one kind, ordered by dense index."""
        chosen = [entry for entry in self.entries if entry.kind == kind]
        return tuple(sorted(chosen, key=lambda entry: entry.index))

    def find(self, layer_id: int, *kinds: str) -> LayerEntry:
        """Find the mixer of a layer that is of one of ``kinds``.

        Raises:
            ValueError: the layer has none of them.
        """
        for entry in self.layers[layer_id]:
            if entry.kind in kinds:
                return entry
        own = [entry.kind for entry in self.layers[layer_id]]
        raise ValueError(f"layer {layer_id} has no {' or '.join(kinds)}, it has {own}")

    def __getitem__(self, layer_id: int) -> LayerEntry:
        """Return the only mixer of a layer.

        Raises:
            ValueError: the layer has none, or several.
        """
        if len(self.layers[layer_id]) != 1:
            kinds = [entry.kind for entry in self.layers[layer_id]]
            raise ValueError(f"layer {layer_id} must have one mixer, it has {kinds}")
        return self.layers[layer_id][0]

    def __len__(self) -> int:
        return len(self.layers)

    def keeping(self, kv_dtype: torch.dtype | None) -> LayerTable:
        """Replace the dtype of cached keys, values and latents; None is the model's."""

        def kept(entry: LayerEntry) -> LayerEntry:
            match entry.spec:
                case AttentionSpec() | LatentSpec() as spec:
                    return replace(entry, spec=replace(spec, kv_dtype=kv_dtype))
            return entry

        return LayerTable(tuple(tuple(map(kept, layer)) for layer in self.layers))

    def divided(self, num_ranks: int) -> LayerTable:
        """Divide the table among ``num_ranks`` ranks; return the table of each rank's part.

        Raises:
            UnsupportedError: the heads of a mixer cannot be divided so.
        """
        return LayerTable(
            tuple(
                tuple(replace(entry, spec=entry.spec.divided(num_ranks)) for entry in layer)
                for layer in self.layers
            )
        )


register_part(LayerEntry)
register_constant(LayerTable)
