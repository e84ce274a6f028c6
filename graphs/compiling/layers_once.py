"""Which layers of a model are traced, and which are copies of those.

Tracing takes as long for each layer as for the one before it, and layers of one kind give the same
calls on other weights and pools. So a step is traced with as many first layers as it takes to see
every kind; ``graphs.instantiate`` puts copies of them where the others belong.

    kind of a layer: all that a trace can see of it but the values of its tensors and its number
    first variant of a runner: every kind twice, so that what differs by layer shows
    later variants:            every kind once
    nowhere counted: layer 0, which reads the embedding and not a layer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.graphs.compiling.instantiate import (
    CannotCopy,
    Layers,
    UnseenValues,
    instantiate,
    mark_layers,
)
from torch_hybrid.graphs.compiling.signature import fact, own_tensors, signature
from torch_hybrid.graphs.step import Caches, LayeredModel, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount:
    """How the layers of one compiled graph came there."""

    traced: int  # 0 where the model does not say what its layers are
    copied: int
    why_not_copied: str = ""  # where none is

    def __str__(self) -> str:
        traced = f"{self.traced} traced, {self.copied} copied"
        return f"{traced}: {self.why_not_copied}" if self.why_not_copied else traced


class LayersOnce:
    """Traces a model's steps with its first layers alone, and completes the graphs.

    Args:
        model: whose steps are traced; one that is no ``LayeredModel`` is traced whole.
        caches: of its layers.
    """

    def __init__(self, model: Model, caches: Caches) -> None:
        self._refused = ""
        self._model = model
        self._layers: Layers | None = None
        self._tracing: int | None = None  # how many layers the model has just now
        self._is_checked = False  # whether layers of one kind were seen to give the same calls
        self._shows_values = False  # whether that takes a second layer of the last one's kind
        if isinstance(model, nn.Module) and isinstance(model, LayeredModel):
            try:
                self._layers = layers_of(model, caches)
            except CannotCopy as error:
                self._refused = str(error)
        else:
            self._refused = "the model has no first_layers"

    def trace(self, step: Callable[[], object]) -> None:
        """Run ``step``, which traces the model; again with all layers if they cannot be copied."""
        layers = self._layers
        if layers is None or self._refused:
            step()
            return
        self._tracing = num_first(layers.kinds, shows_values=self._shows_values)
        if not self._is_checked:
            # A kind that comes back late is not worth tracing all layers before it.
            self._tracing = min(num_first(layers.kinds, times=2), 2 * self._tracing)
        try:
            with self._model.first_layers(self._tracing):  # type: ignore[attr-defined]
                step()
        except torch._dynamo.exc.BackendCompilerFailed as error:
            refusal = error.inner_exception
            if not isinstance(refusal, CannotCopy):
                raise
            if isinstance(refusal, UnseenValues) and not self._shows_values:
                self._shows_values = True
            else:
                self._refused = str(refusal)
        else:
            self._is_checked = True
            return
        finally:
            self._tracing = None
        self.trace(step)  # by what is known now

    def complete(self, module: GraphModule) -> tuple[list[Tensor], LayerCount]:
        """Put the layers that were not traced into a traced graph, and mark the layer of each node.

        Returns:
            The tensors of the placeholders that were added, after those that were there, and how
            many layers came from where.

        Raises:
            CannotCopy: the graph is one of layers that cannot be copied.
        """
        if self._layers is None:
            return [], LayerCount(traced=0, copied=0, why_not_copied=self._refused)
        mark_layers(module.graph, self._layers.names)
        total = len(self._layers.kinds)
        if self._tracing is None:
            return [], LayerCount(traced=total, copied=0, why_not_copied=self._refused)
        if self._tracing == total:
            why = f"all {total} layers are needed to see each kind"
            return [], LayerCount(traced=total, copied=0, why_not_copied=why)
        tensors = instantiate(module, self._layers, self._tracing)
        return tensors, LayerCount(traced=self._tracing, copied=total - self._tracing)


def num_first(kinds: tuple[int, ...], *, times: int = 1, shows_values: bool = False) -> int:
    """The fewest first layers that have the kind of every later layer ``times`` times, layer 0
    not counted.

    Which values the last one gives may show in an earlier one alone, if there are several: with
    ``shows_values``, that is of its kind.
    """
    for count in range(len(kinds)):
        seen = Counter(kinds[1:count])
        is_shown = count > 0 and (not shows_values or seen[kinds[count - 1]] > 1)
        if is_shown and all(seen[kind] >= times for kind in kinds[count:]):
            return count
    return len(kinds)


def layers_of(model: LayeredModel, caches: Caches) -> Layers:
    """The names, kinds and tensors of a model's layers.

    Raises:
        CannotCopy: a layer stands in several places or in none, or has a tensor of a class of
            which nothing is known.
    """
    names = {id(module): name for name, module in model.named_modules()}  # type: ignore[attr-defined]
    found: list[str] = []
    kinds: list[int] = []
    tensors: list[dict[str, Tensor]] = []
    numbers: dict[Any, int] = {}
    for index, layer in enumerate(model.layers):
        if id(layer) not in names:
            raise CannotCopy(f"layer {index} is not among the model's modules")
        if names[id(layer)] in found:
            raise CannotCopy(f"layers {found.index(names[id(layer)])} and {index} are one module")
        found.append(names[id(layer)])
        entries = model.table.layers[index]
        own = _layer_tensors(layer, {e.kind: caches[e.kind][e.index] for e in entries})
        for name, tensor in own.items():
            if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                raise CannotCopy(f"{name} of layer {index} is a {type(tensor).__name__}")
        facts = tuple((entry.kind, fact(entry.spec)) for entry in entries)
        kind = signature(layer), facts, _aliases(list(own.values()))
        kinds.append(numbers.setdefault(kind, len(numbers)))
        tensors.append(own)
    return Layers(names=tuple(found), kinds=tuple(kinds), tensors=tuple(tensors))


def _layer_tensors(layer: nn.Module, mixers: Mapping[str, LayerCache]) -> dict[str, Tensor]:
    """Every tensor of a layer, its caches too, by a name that is the same in each layer."""
    found = {
        f"{path}.{name}": tensor
        for path, module in layer.named_modules(remove_duplicate=False)
        for name, tensor in own_tensors(module)
    }
    for kind, cache in mixers.items():
        found |= {f"{kind} {name}": tensor for name, tensor in cache.items()}
    return found


def _aliases(tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
    """Which of the tensors are one, and which share their memory."""
    same: dict[int, int] = {}
    shared: dict[int, int] = {}
    return tuple(
        (same.setdefault(id(t), i), shared.setdefault(t.untyped_storage()._cdata, i))
        for i, t in enumerate(tensors)
    )
