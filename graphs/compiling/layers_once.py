"""Trace of a model's first layers, of which the other layers are copies.

Each layer takes as long to trace as the one before it. Layers of one kind give the same calls, on
other weights and pools. So a step is traced with as many first layers as show every kind, and
``graphs.compiling.instantiate`` adds copies of these for the other layers.

    kind of a layer: all that a trace can see of it but the values of its tensors and its number
    first variant of a runner: every kind twice, so that what differs by layer shows
    later variants:            every kind once
    never counted: layer 0, which reads the embedding and not a layer
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
from torch_hybrid.graphs.compiling.signature import fact, own_tensors, signature, tensor_facts
from torch_hybrid.graphs.step import Caches, LayeredModel, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount:
    """Numbers of traced and of copied layers in one compiled graph."""

    traced: int  # 0 if the model does not list its layers
    copied: int
    why_not_copied: str = ""  # the reason if ``copied`` is 0


class LayersOnce:
    """Tracer of a model's steps with the first layers alone; it also completes the graphs.

    Args:
        model: the model; if it is no ``LayeredModel``, it is traced whole.
        caches: pools of its layers.
        beside: further tensors of modules, by path.
    """

    def __init__(
        self, model: Model, caches: Caches, beside: Mapping[str, LayerCache] | None = None
    ) -> None:
        self._refused = ""
        self._model = model
        self._layers: Layers | None = None
        self._tracing: int | None = None  # number of layers that the model has during a trace
        self._is_checked = False  # layers of one kind were seen to give the same calls
        self._shows_values = False  # an earlier layer of its kind must show the last's outputs
        if isinstance(model, nn.Module) and isinstance(model, LayeredModel):
            try:
                self._layers = layers_of(model, caches, beside or {})
            except CannotCopy as error:
                self._refused = str(error)
        else:
            self._refused = "the model has no first_layers"

    def trace(self, step: Callable[[], object]) -> None:
        """Run ``step``, which traces the model; if copying fails, run it again with all layers."""
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
        self.trace(step)  # with more first layers, or with all

    def complete(self, module: GraphModule) -> tuple[list[Tensor], LayerCount]:
        """Mark the layer of each node of a traced graph, and add the layers that were not traced.

        Returns:
            The tensors of the new placeholders, which come after the graph's own, and the numbers
            of traced and copied layers.

        Raises:
            CannotCopy: the graph's layers cannot be copied.
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
    """Find the fewest first layers that show the kind of every later layer ``times`` times.

    Layer 0 does not count. With ``shows_values``, they include an earlier layer of the last one's
    kind: it shows which of several values the last layer gives.
    """
    for count in range(len(kinds)):
        seen = Counter(kinds[1:count])
        is_shown = count > 0 and (not shows_values or seen[kinds[count - 1]] > 1)
        if is_shown and all(seen[kind] >= times for kind in kinds[count:]):
            return count
    return len(kinds)


def layers_of(model: LayeredModel, caches: Caches, beside: Mapping[str, LayerCache]) -> Layers:
    """Describe a model's layers by name, kind and tensors.

    Raises:
        CannotCopy: a layer is registered several times or never, or has a tensor of an unknown
            class.
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
        more = _tensors_within(f"{names[id(layer)]}.", beside)
        own |= more
        for name, tensor in own.items():
            if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                raise CannotCopy(f"{name} of layer {index} is a {type(tensor).__name__}")
        facts = tuple((entry.kind, fact(entry.spec)) for entry in entries)
        layouts = tuple((name, tensor_facts(tensor)) for name, tensor in more.items())
        kind = signature(layer), facts, layouts, _aliases(list(own.values()))
        kinds.append(numbers.setdefault(kind, len(numbers)))
        tensors.append(own)
    return Layers(names=tuple(found), kinds=tuple(kinds), tensors=tuple(tensors))


def _layer_tensors(layer: nn.Module, mixers: Mapping[str, LayerCache]) -> dict[str, Tensor]:
    """Collect the tensors of a layer and its caches, by a name that is the same in each layer."""
    found = {
        f"{path}.{name}": tensor
        for path, module in layer.named_modules(remove_duplicate=False)
        for name, tensor in own_tensors(module)
    }
    for kind, cache in mixers.items():
        found |= {f"{kind} {name}": tensor for name, tensor in cache.items()}
    return found


def _tensors_within(prefix: str, beside: Mapping[str, LayerCache]) -> dict[str, Tensor]:
    """Collect tensors of modules of a layer, by names that are the same in each layer."""
    return {
        f"{path.removeprefix(prefix)} {name}": tensor
        for path, cache in beside.items()
        if path.startswith(prefix)
        for name, tensor in cache.items()
    }


def _aliases(tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
    """Find the tensors that are one object, and those that share memory."""
    same: dict[int, int] = {}
    shared: dict[int, int] = {}
    return tuple(
        (same.setdefault(id(t), i), shared.setdefault(t.untyped_storage()._cdata, i))
        for i, t in enumerate(tensors)
    )
