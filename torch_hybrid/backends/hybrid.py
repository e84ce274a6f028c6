"""Every kind of layer of a model planned at once, and handed to the layers as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch.utils import _pytree as pytree

from torch_hybrid.backends.gated_delta_rule import DeltaRuleBackend, DeltaRulePlan
from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.paged_attention import PagedAttentionBackend, PagedAttentionPlan
from torch_hybrid.backends.select import Backends, Choice
from torch_hybrid.batch import Batch
from torch_hybrid.caches.hybrid import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.specs import LayerEntry, LayerTable

Plan = PagedAttentionPlan | DeltaRulePlan


class Backend(Protocol):
    """All that a runner asks of the backend of one kind of layer."""

    @property
    def choices(self) -> Mapping[Mode, tuple[Choice, ...]]:
        """What was chosen in each mode, for each op that a layer calls."""
        ...

    def plan(self, batch: Batch, mode: Mode) -> Plan:
        """The plan of one step."""
        ...


_BACKENDS: dict[str, Callable[[tuple[LayerEntry, ...], PoolSizes, Backends], Backend]] = {
    "paged_attention": PagedAttentionBackend,
    "gated_delta_rule": DeltaRuleBackend,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the layers of a model need beyond their activations: plans, caches, and the table."""

    plans: dict[str, Plan]  # by kind of layer
    caches: dict[str, tuple[LayerCache, ...]]  # by kind, then dense index
    table: LayerTable

    def layer(self, layer_id: int) -> tuple[LayerEntry, Plan, LayerCache]:
        """The facts, plan and cache of one layer; resolved while tracing."""
        entry = self.table[layer_id]
        return entry, self.plans[entry.kind], self.caches[entry.kind][entry.index]


pytree.register_dataclass(Step)


def make_backends(
    table: LayerTable, sizes: PoolSizes, backends: Backends | None = None
) -> dict[str, Backend]:
    """One backend for each kind of layer in the table, with the implementations named.

    Raises:
        UnsupportedError: no implementation can serve a kind; the message has every reason.
    """
    names = backends or Backends()
    return {kind: _BACKENDS[kind](table.of_kind(kind), sizes, names) for kind in table.kinds}


def plan_all(backends: Mapping[str, Backend], batch: Batch, mode: Mode) -> dict[str, Plan]:
    """A plan for every kind of layer. Pure: equal batches give equal plans that share nothing
    but the batch's own tensors."""
    return {kind: backend.plan(batch, mode) for kind, backend in backends.items()}
