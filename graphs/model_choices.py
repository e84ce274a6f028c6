"""What a runner chooses beside its backends: who computes experts, and who linear layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torch_hybrid.backends.select import Backends, Choice, Chooses, select
from torch_hybrid.graphs.passes import Pass, without
from torch_hybrid.graphs.step import Model
from torch_hybrid.ops.capability import Need
from torch_hybrid.ops.linear import op as linear

EXPERTS = "fused_experts"


def experts_of(model: Model) -> list[Chooses]:
    """The experts of all layers of a model."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, Chooses)]


def choose(model: Model, wanted: Backends, *, compiles: bool) -> tuple[Choice, ...]:
    """Who computes all experts of a model, if it has some, and the linear layers of its steps, if
    they are compiled.

    Raises:
        ValueError: a name is of no implementation.
        UnsupportedError: none can serve what there is, where it is now.
    """
    choices = []
    if experts := experts_of(model):
        needs = [module.need for module in experts]
        choices.append(
            select(
                EXPERTS, experts[0].implementations, needs, wanted.named(EXPERTS, wanted.experts)
            )
        )
    if compiles:
        known = {impl: linear.IMPLEMENTATIONS[impl] for impl in ("cpp", "torch")}
        need = Need(device=model.device, dtype=model.dtype)
        choices.append(select("linear", known, need, wanted.named("linear", wanted.products)))
    return tuple(choices)


def passes_for(products: str, passes: Sequence[Pass]) -> Sequence[Pass]:
    """``passes``, of which none gives linear layers to another than torch, where it was asked for
    by name."""
    names = {graph_pass.name for graph_pass in passes}
    return without(passes, names & {"merge_linears"}) if products == "torch" else passes
