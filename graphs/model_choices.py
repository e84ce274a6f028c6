"""What a runner chooses beside its backends: who computes experts, and who linear layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.select import Backends, Choice, Chooses, impls_of, select
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
        need = Need(device=model.device, dtype=model.dtype)
        preferred = wanted.named("linear", wanted.products)
        choices.append(select("linear", linear.IMPLEMENTATIONS, need, preferred))
    return tuple(choices)


def passes_for(
    choices: Sequence[Choice], passes: Sequence[Pass], modes: Sequence[Mode]
) -> dict[Mode, Sequence[Pass]]:
    """``passes`` for the steps of each mode: linear layers are merged where that was chosen.

    On a GPU, where steps have few rows: torch's products of many are slower into the columns of one
    result, which may begin anywhere.
    """
    impls = dict(impls_of(choices))

    def merges(mode: Mode) -> bool:
        impl = impls.get("linear", "torch")
        return impl == "cpp" or (impl == "triton" and mode.tokens_per_seq is not None)

    names = {graph_pass.name for graph_pass in passes} & {"merge_linears"}
    return {mode: passes if merges(mode) else without(passes, names) for mode in modes}
