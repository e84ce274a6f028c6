"""One step of a model: its inputs, its variants (a graph each), and the function that is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_hybrid.backends.mode import LayerForm, Mode
from torch_hybrid.backends.step import Plan, Step
from torch_hybrid.batch import Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.graphs.passes.marks import in_half
from torch_hybrid.layers.adapted import AdaptedLayers
from torch_hybrid.layers.adapter_sites import AdapterKinds, AdapterSite, Factors
from torch_hybrid.pytrees import OnHost, register_value
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import LayerTable

Caches = dict[str, tuple[LayerCache, ...]]
# Keys beside the kinds of layers: of rows that replace embeddings, and of adapters' factors.
GIVEN, ADAPTERS = "given", "adapters"


class Model(Protocol):
    """Model that a runner can run.

    It may also have ``max_positions``, the most tokens of a sequence: no pool is then sized for
    more. A model with ``embed_dim`` takes rows of that width in the place of token embeddings. Its
    forward then has ``embeds`` [rows, dim], and ``embed_rows`` [T], the row of each token, 0 for
    its own embedding. ``vision`` is the tower that the rows come from, if there is one.
    """

    table: LayerTable
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_position_axes: int
    ranks: Ranks | None  # the ranks that share the model, after ``shard``

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        step: Step,
        *,
        embeds: Tensor | None = None,
        embed_rows: Tensor | None = None,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@runtime_checkable
class LayeredModel(Model, Protocol):
    """Module that can list its layers, so that those of one kind are compiled once.

    Each layer takes the values of the layer before it. ``first_layers(n)`` is a context in which
    the model has its first n layers alone and can be called; its ``table`` keeps all layers.
    """

    @property
    def layers(self) -> Sequence[nn.Module]: ...

    def first_layers(self, count: int) -> AbstractContextManager[None]: ...


@runtime_checkable
class UpdatableModel(Model, Protocol):
    """Model that was read from a checkpoint, and takes new weights by the checkpoint's names.

    ``new_weights`` checks the weights as far as it can beforehand, and returns a function that
    writes them.
    """

    def new_weights(
        self,
        weights: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        partial: bool,
    ) -> Callable[[], None]: ...


@runtime_checkable
class AdaptableModel(Model, Protocol):
    """Model whose linear layers adapters may change, one of several for each row.

    ``adapter_sites`` lists these layers. ``read_adapter`` reads an adapter of at most some rank
    from a folder or a model, as factors of each part of each site.
    """

    def adapter_sites(self, kinds: AdapterKinds) -> Sequence[AdapterSite]: ...

    def read_adapter(
        self, source: Path | nn.Module, max_rank: int, kinds: AdapterKinds
    ) -> Sequence[Sequence[Factors]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """Batch with its plans: a whole step, or one half of it."""

    batch: Batch
    plans: dict[str, Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs that change from step to step.

    ``rows`` selects the tokens whose logits are returned, as indices into the parts' tokens, one
    part after the other; None selects all.
    """

    parts: tuple[BatchPart, ...]
    rows: Tensor | None  # [R] int64


register_value(BatchPart)
register_value(Inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Kind of step with a graph of its own: mode, layer forms, whether it runs in halves, and
    whether it adds adapters."""

    mode: Mode
    forms: tuple[tuple[str, str], ...]  # pairs of a kind of layer and the name of its form
    in_halves: bool
    has_adapters: bool = False  # whether a sequence has an adapter

    @classmethod
    def of(
        cls,
        mode: Mode,
        forms: Mapping[str, LayerForm],
        *,
        in_halves: bool,
        has_adapters: bool = False,
    ) -> Variant:
        """Make the variant of a step."""
        names = tuple((kind, form.name) for kind, form in forms.items())
        return cls(mode=mode, forms=names, in_halves=in_halves, has_adapters=has_adapters)

    @property
    def name(self) -> str:
        """Name for reports: "extend, one shot, in halves", for example."""
        forms = [name for _, name in self.forms if name and self.mode.tokens_per_seq is None]
        more = [*["in halves"] * self.in_halves, *["adapters"] * self.has_adapters]
        return ", ".join([self.mode.name, *forms, *more])


@runtime_checkable
class DraftingModel(Model, Protocol):
    """Model with a draft head, which predicts further tokens by layers of its own.

    The head's layers stand in the model's ``table`` after those of the model. They read prompts in
    the model's own steps, and later tokens in ``draft``. ``drafting`` has their kinds; none if
    there is no head.
    """

    @property
    def drafting(self) -> frozenset[str]: ...

    def draft(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, step: Step
    ) -> Tensor: ...


InputsT = TypeVar("InputsT")
StepFunction = Callable[[Inputs, Caches], Tensor]


def make_step(model: Model, adapted: AdaptedLayers | None = None) -> StepFunction:
    """Make the function to trace: it runs each part through the model, and computes logits.

    With ``adapted`` layers, it hands them the adapter of each row.
    """

    def give(slots: Sequence[Tensor | None], rows: Tensor | None, caches: Caches) -> None:
        if adapted is not None:
            joined = torch.cat([each for each in slots if each is not None])
            adapted.give(joined if rows is None else joined[rows], caches[ADAPTERS])

    def step(inputs: Inputs, caches: Caches) -> Tensor:
        def run(part: BatchPart) -> Tensor:
            give([part.batch.adapter_slots], None, caches)
            layers = Step(plans=part.plans, caches=caches, table=model.table)
            batch = part.batch
            if batch.embed_rows is None:
                return model(batch.tokens, batch.positions, layers)
            rows = caches[GIVEN][0]["rows"]
            return model(
                batch.tokens, batch.positions, layers, embeds=rows, embed_rows=batch.embed_rows
            )

        if len(inputs.parts) == 1:
            hidden = run(inputs.parts[0])
        else:
            halves = []
            for index, part in enumerate(inputs.parts):
                with in_half(index):
                    halves.append(run(part))
            hidden = torch.cat(halves)
        if inputs.rows is not None:
            hidden = hidden[inputs.rows]
        give([part.batch.adapter_slots for part in inputs.parts], inputs.rows, caches)
        logits = model.logits(hidden)
        if adapted is not None:
            adapted.give(None)
        return logits

    return step


def make_draft_step(model: DraftingModel) -> StepFunction:
    """Make the function to trace of a draft head.

    The first part reads the tokens that the head has not read. Each further part reads the drafts
    of the part before it. The function returns the drafts of all parts, [parts, N].
    """

    def step(inputs: Inputs, caches: Caches) -> Tensor:
        tokens, hidden = inputs.parts[0].batch.tokens, None
        drafted: list[Tensor] = []
        for part in inputs.parts:
            layers = Step(plans=part.plans, caches=caches, table=model.table)
            if not drafted:
                last = part.batch.cu_seqlens[1:] - 1
                hidden = model.draft(tokens, None, part.batch.positions, layers)[last]
            else:
                hidden = model.draft(tokens, hidden, part.batch.positions, layers)
            tokens = model.logits(hidden).argmax(-1)
            drafted.append(tokens)
        return torch.stack(drafted)

    return step


def kinds_of_head(model: Model) -> frozenset[str]:
    """List the kinds of layers in a model's draft head; none if it has no head."""
    return model.drafting if isinstance(model, DraftingModel) else frozenset()


def map_tensors(action: Callable[[Tensor], Tensor], inputs: InputsT) -> InputsT:
    """Apply ``action`` to each tensor of ``inputs`` once, except tensors that stay on the host.

    A tensor that stands in several places stays one: guards of graphs depend on that.
    """
    done: dict[int, Tensor] = {}

    def once(leaf: Tensor) -> Tensor:
        if id(leaf) not in done:
            done[id(leaf)] = action(leaf)
        return done[id(leaf)]

    mapped: InputsT = pytree.tree_map_only(
        Tensor, once, inputs, is_leaf=lambda node: isinstance(node, OnHost)
    )
    return mapped
