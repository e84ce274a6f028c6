"""Step of a model: the plans of all kinds of layers, handed to the layers as one value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch_hybrid.backends.free_sizes import free_sizes
from torch_hybrid.backends.indexed_attention import (
    GATED_POOLING,
    POOLED_SELECTION_STEP,
    IndexedAttentionBackend,
    IndexedPlan,
)
from torch_hybrid.backends.latent_attention import LatentAttentionBackend, LatentPlan
from torch_hybrid.backends.mode import MODES, LayerForm, Mode
from torch_hybrid.backends.paged_attention import PagedAttentionBackend, PagedAttentionPlan
from torch_hybrid.backends.prefix import PrefixPolicy
from torch_hybrid.backends.previous_hidden import PreviousHiddenBackend, PreviousHiddenPlan
from torch_hybrid.backends.recurrences import RECURRENCES
from torch_hybrid.backends.recurrent import (
    CONVOLUTION,
    RecurrentBackend,
    RecurrentPlan,
)
from torch_hybrid.backends.select import Backends, Choice
from torch_hybrid.batch import Batch, at_least_two
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.pytrees import register_value, tensors_of
from torch_hybrid.specs import LayerEntry, LayerTable
from torch_hybrid.specs.layer import OPS
from torch_hybrid.specs.pools import OPEN_CHUNK

Plan = PagedAttentionPlan | LatentPlan | IndexedPlan | RecurrentPlan | PreviousHiddenPlan


class LayerBackend(Protocol):
    """Interface of a backend: it plans steps for one kind of layer of a model."""

    @property
    def choices(self) -> Mapping[Mode, tuple[Choice, ...]]:
        """Choices for the ops that a layer calls, by mode that is served."""
        ...

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk of a prefill; 0 if prefill has no chunks."""
        ...

    def forms(self, mode: Mode) -> tuple[LayerForm, ...]:
        """List the forms that steps of a mode may take, each at its largest; each is a graph."""
        ...

    def form_of(self, batches: Sequence[Batch], mode: Mode) -> LayerForm:
        """Choose the form of one step from the lengths of its batches, which all run in it."""
        ...

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> Plan:
        """Plan one step in one of its forms."""
        ...


MakeBackend = Callable[[tuple[LayerEntry, ...], PoolSizes, Backends, Sequence[Mode]], LayerBackend]
_BACKENDS: dict[str, MakeBackend] = {
    "paged_attention": PagedAttentionBackend,
    "latent_attention": LatentAttentionBackend,
    "indexed_attention": partial(IndexedAttentionBackend, CONVOLUTION, None),
    "indexed_latent_attention": partial(
        IndexedAttentionBackend, GATED_POOLING, POOLED_SELECTION_STEP
    ),
    "previous_hidden": PreviousHiddenBackend,
    **{kind: partial(RecurrentBackend, rule) for kind, rule in RECURRENCES.items()},
    **{kind: partial(RecurrentBackend.of_ops, ops) for kind, ops in OPS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Plans, caches and layer table: all that a model's layers need beyond their activations."""

    plans: dict[str, Plan]  # by kind of layer
    caches: dict[str, tuple[LayerCache, ...]]  # by kind, then dense index
    table: LayerTable

    def layer(self, layer_id: int, *kinds: str) -> tuple[LayerEntry, Plan, LayerCache]:
        """Find the entry, plan and cache of a layer's mixer; resolved while tracing.

        ``kinds`` selects the mixer of a layer that has several: its kind is one of these.

        Raises:
            ValueError: the layer has no such mixer.
        """
        entry = self.table.find(layer_id, *kinds) if kinds else self.table[layer_id]
        return entry, self.plans[entry.kind], self.caches[entry.kind][entry.index]

    def at(self, layer_id: int) -> LayerStep:
        """Bind the step to the layer of that id."""
        return LayerStep(self, layer_id)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Step of one layer: the step, and the layer's id.

    Modules in the layer need no id of their own. A module that several layers call finds the plan
    and cache of the layer that calls it.
    """

    step: Step
    layer_id: int

    def mixer(self, *kinds: str) -> tuple[LayerEntry, Plan, LayerCache]:
        """Find the entry, plan and cache of this layer's mixer; see ``Step.layer``."""
        return self.step.layer(self.layer_id, *kinds)


register_value(Step)


def make_backends(
    table: LayerTable,
    sizes: PoolSizes,
    backends: Backends | None = None,
    modes: Sequence[Mode] = MODES,
) -> dict[str, LayerBackend]:
    """Make a backend for each kind of layer in the table.

    Args:
        table: layer table of the model.
        sizes: pool sizes of its cache.
        backends: names of the implementations to take. None takes any, and prefills MLA in one
            form, the absorbed one, so that a compiled module needs one graph for all lengths.
            ``Backends()`` chooses a form for each step: faster, with a graph for each form.
        modes: modes of the steps to come; nothing is chosen for others.

    Raises:
        UnsupportedError: no implementation can serve a kind; the message has every reason.
    """
    names = backends or Backends(prefix=PrefixPolicy(absorbed="always"))
    return {kind: _BACKENDS[kind](table.of_kind(kind), sizes, names, modes) for kind in table.kinds}


def opens_chunks(table: LayerTable, sizes: PoolSizes, backends: Backends) -> bool:
    """Tell whether decode keeps chunks open (``ops/open_chunk``) in all layers that have records of
    them.

    It stores a state for each token where drafts are verified, and where a token has its bits in
    any batch.
    """
    if sizes.num_drafts or backends.batch_invariant:
        return False
    specs = {kind: {entry.spec for entry in table.of_kind(kind)} for kind in table.kinds}
    kinds = [k for k, each in specs.items() if any(OPEN_CHUNK in spec.pools() for spec in each)]
    rules = ((RECURRENCES[kind], specs[kind]) for kind in kinds)
    return bool(kinds) and all(rule.opens_chunks(each, sizes, backends) for rule, each in rules)


def chunk_grid(backends: Mapping[str, LayerBackend]) -> int:
    """Compute the tokens at whose multiples a step may cut a sequence without cutting a chunk."""
    return math.lcm(*(backend.chunk_size or 1 for backend in backends.values()))


def forms_of(
    backends: Mapping[str, LayerBackend], batches: Sequence[Batch], mode: Mode
) -> dict[str, LayerForm]:
    """Choose the form of each kind of layer for one step: a batch, or the halves of one."""
    return {kind: backend.form_of(batches, mode) for kind, backend in backends.items()}


def plan_all(
    backends: Mapping[str, LayerBackend],
    batch: Batch,
    mode: Mode,
    forms: Mapping[str, LayerForm] | None = None,
) -> dict[str, Plan]:
    """Plan a step for every kind of layer. Pure: equal batches give equal plans, which share
    nothing but the batch's own tensors.

    A module that is compiled with ``fullgraph=True`` gets three graphs for any batches: decode of
    one token, decode of more, and extend, with one for each form of MLA. A loop that pads
    (``buckets`` of ``HybridCache.make_batch``) never decodes one token, and needs two graphs. For
    this, no size of a plan is 0 or 1, and each size of batch and plan is marked as dynamic. The
    caller marks other inputs with a row per token by ``torch._dynamo.maybe_mark_dynamic``. A step
    of at most one token per sequence is planned as decode if ``backends`` serve that mode.

    Args:
        backends: backends from ``make_backends``.
        batch: batch on the host.
        mode: mode of the step.
        forms: forms from ``forms_of``, for a caller that chooses sizes and mode itself; the batch
            is then planned as it is. By default the forms follow from the lengths.

    Returns:
        Plans by kind of layer.

    Raises:
        ValueError: no backend was made for ``mode``.
    """
    if forms is not None:
        return {kind: backend.plan(batch, mode, forms[kind]) for kind, backend in backends.items()}
    for kind, backend in backends.items():
        if mode not in backend.choices:
            modes = [each.name for each in backend.choices]
            raise ValueError(f"mode must be one of {modes}, which {kind} has, got {mode}")
    if mode == Mode.EXTEND and _decodes(backends) and bool((batch.cu_seqlens.diff() <= 1).all()):
        mode = Mode.DECODE
    padded = at_least_two(batch)
    plans = plan_all(backends, padded, mode, forms_of(backends, [padded], mode))
    free_sizes(*tensors_of((batch, plans))[0])
    return plans


def _decodes(backends: Mapping[str, LayerBackend]) -> bool:
    return all(Mode.DECODE in backend.choices for backend in backends.values())
