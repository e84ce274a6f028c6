"""Implementations that a runner chooses beside its backends: of experts and of linear layers.

Modules whose weights have scales form kinds of their own: "fp8 linear", "int4 fused_experts".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from torch import nn

from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.select import Backends, Choice, HasImplementation, impls_of, select
from torch_hybrid.backends.step import LayerBackend
from torch_hybrid.graphs.passes import Pass, without
from torch_hybrid.graphs.passes.merge_linears import merge_linears
from torch_hybrid.graphs.passes.narrow_products import narrow_products
from torch_hybrid.graphs.passes.ordered_sums import ordered_sums
from torch_hybrid.graphs.passes.own_linears import has_large_linears
from torch_hybrid.graphs.passes.row_products import row_products
from torch_hybrid.graphs.passes.row_sums import row_sums
from torch_hybrid.graphs.passes.short_sums import short_sums
from torch_hybrid.graphs.step import Model
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, Implementation, Need
from torch_hybrid.ops.core.registration import REGISTERED
from torch_hybrid.ops.linear import op as linear
from torch_hybrid.ops.native.ahead import Builds, build_ahead


def modules_of(model: Model) -> list[nn.Module]:
    """List the modules of a model; none if the model is no ``nn.Module``."""
    return list(model.modules()) if isinstance(model, nn.Module) else []


def choosers_of(model: Model) -> list[HasImplementation]:
    """List a model's experts and its linear layers with scales: modules that call a chosen op."""
    return [module for module in modules_of(model) if isinstance(module, HasImplementation)]


def choices_of(model: Model, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Select the choices that modules of a model use."""
    kinds = {module.kind for module in choosers_of(model)}
    return tuple(choice for choice in choices if choice.op in kinds)


def set_choices(model: Model, choices: Sequence[Choice]) -> None:
    """Set the choice of each module of a model, by the module's kind."""
    by_kind = {choice.op: choice for choice in choices}
    for module in choosers_of(model):
        module.choice = by_kind[module.kind]


def choose(model: Model, wanted: Backends, *, compiles: bool) -> tuple[Choice, ...]:
    """Choose the implementations of a model's experts and linear layers.

    Plain linear layers are chosen for only in compiled or batch-invariant steps, and in those of
    large models on a CPU; otherwise torch computes them.

    Raises:
        ValueError: a wanted name is no implementation.
        UnsupportedError: no implementation serves the model on its device.
    """
    preferred = {
        "fused_experts": wanted.named("fused_experts", wanted.experts),
        "linear": wanted.named("linear", wanted.products),
        "head_linear": "auto",
    }
    modules: dict[str, list[HasImplementation]] = {}
    for module in choosers_of(model):
        modules.setdefault(module.kind, []).append(module)
    choices = [
        select(
            kind,
            group[0].implementations,
            [_with(module.need, wanted) for module in group],
            wanted.named(kind, preferred[group[0].op]),
        )
        for kind, group in modules.items()
    ]
    own = model.device.type == "cpu" and has_large_linears(modules_of(model))
    if compiles or wanted.batch_invariant or own:
        need = _with(Need(device=model.device, dtype=model.dtype), wanted)
        choices.append(select("linear", linear.IMPLEMENTATIONS, need, preferred["linear"]))
    return tuple(choices)


def start_builds(choices: Sequence[Choice], backends: Mapping[str, LayerBackend]) -> Builds:
    """Start the builds of chosen native kernels that the cache lacks, those of prefill first."""
    by_mode = [pair for backend in backends.values() for pair in backend.choices.items()]
    of_prompts = [chosen for mode, chosen in by_mode if mode.tokens_per_seq is None]
    first = chain(choices, *of_prompts)
    others = chain(*(chosen for _, chosen in by_mode))
    return build_ahead(_implementations(first), _implementations(others))


def _implementations(choices: Iterable[Choice]) -> list[Implementation]:
    """List the chosen implementations of ops; a choice that stands for several others has no op."""
    chosen = {(each.op.split()[-1], each.impl) for each in choices}
    return [REGISTERED[op][impl] for op, impl in chosen if impl in REGISTERED.get(op, ())]


def _with(need: Need, wanted: Backends) -> Need:
    """Add the features that the user asked of every implementation to a module's need."""
    return replace(need, features=need.features | wanted.features)


def passes_for(
    choices: Sequence[Choice],
    passes: Sequence[Pass],
    modes: Sequence[Mode],
    *,
    batch_invariant: bool = False,
    num_ranks: int = 1,
    sums_at_once: bool = False,
) -> dict[Mode, Sequence[Pass]]:
    """Choose the graph passes of each mode.

    Linear layers are merged where the chosen implementation profits: always with "cpp", in steps of
    few rows with "triton". In steps of many rows, torch computes the products one after the other.

    With ``sums_at_once``, steps of few rows get ``short_sums``.

    Batch-invariant steps also replace every product, and sums over ranks by sums in a fixed order.
    On a GPU they replace sums over a row, whose order Inductor would choose.
    """
    impls = dict(impls_of(choices))
    if batch_invariant:
        merge = Pass("merge_linears", partial(merge_linears, features=frozenset({BATCH_INVARIANT})))
        narrow = Pass("narrow_products", partial(narrow_products, devices=("cpu", "cuda")))
        own = [narrow, Pass("row_products", partial(row_products, impl=impls["linear"]))]
        if num_ranks > 1:
            own.append(Pass("ordered_sums", partial(ordered_sums, num_ranks=num_ranks)))
        others = [each for each in passes if each.name != narrow.name]
        last = Pass("row_sums", row_sums)
        kept = [merge if each.name == "merge_linears" else each for each in others]
        place = kept.index(merge) + 1 if merge in kept else 0
        return dict.fromkeys(modes, (*kept[:place], *own, *kept[place:], last))

    def merges(mode: Mode) -> bool:
        impl = impls.get("linear", "torch")
        return impl == "cpp" or (impl == "triton" and mode.tokens_per_seq is not None)

    names = {graph_pass.name for graph_pass in passes} & {"merge_linears"}
    short = (Pass("short_sums", short_sums),) if sums_at_once else ()
    return {
        mode: (
            *(passes if merges(mode) else without(passes, names)),
            *(short if mode.tokens_per_seq is not None else ()),
        )
        for mode in modes
    }
