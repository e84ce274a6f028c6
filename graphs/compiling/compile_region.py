"""Compilation of one region of a step by Inductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

from torch.fx import Graph, GraphModule

from torch_hybrid.graphs.compiling.fixed_arithmetic import round_every_value
from torch_hybrid.graphs.compiling.regions import Compiled, Region
from torch_hybrid.graphs.passes.mutation import storages
from torch_hybrid.graphs.passes.values import value_of
from torch_hybrid.ops.core.registration import NAMESPACE, REGISTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRegion:
    """Region compiled by Inductor.

    Attributes:
        call: the compiled function; it takes the list of its inputs.
        owner: the object that ``call`` comes from; freeing it breaks ``call``.
        sources: code that Inductor generated.
        ops: "op[impl]" to number of calls.
    """

    call: Compiled
    owner: object
    sources: tuple[str, ...]
    ops: Counter[str] = field(default_factory=Counter)


def compile_region(
    region: Region, root: GraphModule, *, rounds_every_value: bool = False
) -> CompiledRegion:
    """Compile a region of the graph of ``root`` by Inductor."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    module = region.module(root)
    inputs = [value_of(node) for node in region.inputs]
    is_plain = not _returns_inputs(module.graph)
    num_given = _num_inputs_and_outputs(module.graph)
    direct: list[Any] = []
    sources: list[str] = []
    ops: Counter[str] = Counter()

    def compile_inner(graph: GraphModule, *args: Any, **options: Any) -> Any:
        ops.update(_ops_of(graph))
        if rounds_every_value:
            round_every_value(graph.graph)
        compiled: Any = compile_fx_inner(graph, *args, **options)
        sources.append(compiled.source_code)
        if is_plain and _num_inputs_and_outputs(graph.graph) == num_given:
            direct.append(compiled)
        return compiled

    wrapped: Any = compile_fx(module, inputs, inner_compile=compile_inner)

    def call(given: list[Any]) -> Sequence[Any]:
        result: Sequence[Any] = wrapped(*given)
        return result

    # Autograd's wrapper takes three times as long as the call itself, and does nothing for a region
    # whose inputs and outputs pass unchanged.
    is_direct = len(direct) == len(sources) == 1
    return CompiledRegion(
        call=direct[0].current_callable if is_direct else call,
        owner=direct[0] if is_direct else wrapped,
        sources=tuple(sources),
        ops=ops,
    )


@contextmanager
def built_together() -> Iterator[None]:
    """Let the C++ kernels of all regions be built at once, and wait for them at the end.

    Inductor waits for the kernels of a region where it loads the region's code, and writes none
    meanwhile.
    """
    from torch._inductor.async_compile import AsyncCompile

    inductor: Any = AsyncCompile
    own = inductor.wait
    thread, waits = get_ident(), list[Callable[[], None]]()

    def wait(kernels: Any, scope: dict[str, Any]) -> None:
        if get_ident() == thread:
            waits.append(partial(own, kernels, scope))
        else:
            own(kernels, scope)

    inductor.wait = wait
    try:
        yield
    finally:
        inductor.wait = own
    for each in waits:
        each()


def _num_inputs_and_outputs(graph: Graph) -> tuple[int, int]:
    return len(graph.find_nodes(op="placeholder")), len(graph.output_node().args[0])  # type: ignore[arg-type]


def _returns_inputs(graph: Graph) -> bool:
    """Tell whether a graph returns one of its inputs, or a view of one."""
    given = storages(graph.find_nodes(op="placeholder"))
    returned = graph.output_node().all_input_nodes
    return any(n.op == "placeholder" for n in returned) or bool(storages(returned) & given)


def _ops_of(graph: GraphModule) -> Counter[str]:
    """Count the calls of this package's ops by implementation, in a functionalized graph."""
    ops: Counter[str] = Counter()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        target = (
            str(node.args[0]) if "auto_functionalized" in str(node.target) else str(node.target)
        )
        namespace, _, name = target.partition(".")
        name = name.partition(".")[0]
        if namespace == NAMESPACE and name in REGISTERED:
            ops[f"{name}[{node.kwargs.get('impl')}]"] += 1
    return ops
