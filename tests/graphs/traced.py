"""Graphs as Dynamo traces them, to apply passes to and to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from torch_hybrid.backends.mode import Mode
from torch_hybrid.graphs.passes.marks import in_half
from torch_hybrid.graphs.passes.values import value_of
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.ops.causal_conv1d import causal_conv1d

WIDTH = 8
Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Traced:
    """A Dynamo graph before any pass, and the inputs that it was traced with."""

    module: GraphModule
    inputs: list[Any]

    def run(self) -> tuple[Tensor, list[Any]]:
        """The output on copies of the inputs, and the copies as the graph leaves them."""
        copies = _copied(self.inputs)
        self.module.recompile()
        with torch.inference_mode():
            [output] = self.module(*copies)
        return output, copies


def _copied(inputs: Iterable[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def trace(step: Callable[..., object], *args: Any, **options: Any) -> Traced:
    """The graph that ``step`` is traced to; ``step`` has an effect on ``args``."""
    seen: list[Traced] = []

    def backend(module: GraphModule, _inputs: object) -> Callable[..., object]:
        def run(*inputs: Any) -> object:
            seen.append(Traced(module, _copied(inputs)))
            return module.forward(*inputs)

        return run

    torch._dynamo.reset()
    torch.compile(step, backend=backend, fullgraph=True, **options)(*args)
    [traced] = seen
    return traced


def in_halves(half: Callable[..., Tensor]) -> Step:
    """A step that runs ``half(x, *shared)`` on both rows of x."""

    def step(x: Tensor, *shared: Tensor) -> Tensor:
        outputs = []
        for index in (0, 1):
            with in_half(index):
                outputs.append(half(x[index], *shared))
        return torch.cat(outputs)

    return step


def conv(x: Tensor, pool: Tensor, first_slot: int) -> Tensor:
    """One mixer op on a pool."""
    rows = torch.tensor([0, x.shape[0]], dtype=torch.int32)
    slot = torch.tensor([first_slot], dtype=torch.int32)
    weight = torch.ones(WIDTH, 4)
    options = {"activation": "silu", "impl": "torch"}
    return causal_conv1d(x, weight, None, pool, rows, slot, slot, **options)


def two_layers(x: Tensor, a: Tensor, b: Tensor, pool: Tensor, other: Tensor) -> Tensor:
    x = conv(F.linear(x, a), pool, 1).relu()
    x = conv(F.linear(x, b) + x, other, 1)
    return F.linear(x, a).tanh()


def arguments() -> tuple[Tensor, ...]:
    weights = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    return torch.randn(2, 5, WIDTH), *weights, torch.zeros(3, 3, WIDTH), torch.zeros(3, 3, WIDTH)


def trace_model(model: HybridModel, lengths: list[int]) -> Traced:
    """The graph of one step of a model, in halves."""
    runner = Runner(model, max_seqs=3, max_tokens=128, compile=False, two_batch_overlap="on")
    for pool in runner.cache.pool_tensors():
        torch._dynamo.mark_static(pool)
    mode = Mode.DECODE if max(lengths) == 1 else Mode.EXTEND
    seqs = runner.new_sequences(len(lengths))
    batch = runner.cache.make_batch(
        seqs, [[5] * n for n in lengths], table_width=runner._planner.table_width
    )
    variant, inputs = runner._planner.plan(batch, mode, "last")
    with torch.inference_mode():
        return trace(runner._steps.of[variant], inputs, runner.cache.pools, dynamic=True)


class Compare(Interpreter):
    """Runs a graph, and notes the nodes whose tensors are not as their values say."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.num_compared = 0
        self.wrong: list[str] = []

    def run_node(self, node: Node) -> Any:
        actual = super().run_node(node)
        if node.op.startswith("call_") and isinstance(actual, Tensor) and actual.numel():
            self._compare(node, actual, value_of(node))
        return actual

    def _compare(self, node: Node, actual: Tensor, value: Tensor) -> None:
        self.num_compared += 1
        steps = [i for i, size in enumerate(actual.shape) if size > 1]  # others are never taken
        pairs = zip(
            (*value.shape, *map(value.stride, steps)),
            (*actual.shape, *map(actual.stride, steps)),
            strict=True,
        )
        if any(isinstance(said, int) and said != is_so for said, is_so in pairs):
            self.wrong.append(f"{node}: {value.shape} by {value.stride()}, is {actual.stride()}")
        if value.dtype != actual.dtype:
            self.wrong.append(f"{node}: {value.dtype}, is {actual.dtype}")
        for source in node.all_input_nodes:
            given, known = self.env.get(source), source.meta.get("example_value")
            if isinstance(given, Tensor) and isinstance(known, Tensor):
                is_view = _storage(given) == _storage(actual)
                if is_view != (_storage(known) == _storage(value)):
                    self.wrong.append(f"{node}: a view of {source} or not")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def check_values(traced: Traced) -> None:
    """Raise AssertionError where a tensor is not as its node's value says."""
    compare = Compare(traced.module)
    with torch.inference_mode():
        compare.run(*traced.inputs)
    assert compare.num_compared
    assert not compare.wrong, "\n".join(compare.wrong)
