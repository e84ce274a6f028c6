"""Passes keep values; what they do to a small graph is pinned as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from torch_hybrid.graphs.passes import (
    DEFAULT_PASSES,
    Pass,
    PassRecord,
    apply_passes,
    graph_text,
    without,
)
from torch_hybrid.graphs.passes.marks import in_half
from torch_hybrid.graphs.passes.merge_linears import merge_linears
from torch_hybrid.ops.linear import linear
from torch_hybrid.ops.linear.by_torch import ALIGNED
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS
from torch_hybrid.ops.native import compiler_missing

MERGE = Pass("merge_linears", merge_linears)
pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason="no C++ compiler")


class Block(nn.Module):
    """Three layers that read x, one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 6, bias=True)
        self.k = nn.Linear(8, 4, bias=False)
        self.out = nn.Linear(6, 8, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(x).relu()
        return self.out(q), self.k(x)


def run(
    fn: Callable[..., object], *args: Tensor, passes: Sequence[Pass] = (MERGE,)
) -> tuple[object, str, list[PassRecord]]:
    """The result of ``fn`` with the passes applied, its graph as text, and the records."""
    seen: list[tuple[str, list[PassRecord]]] = []

    def backend(module: GraphModule, _inputs: object) -> Callable[..., object]:
        records = apply_passes(module, passes)
        seen.append((text(module.graph), records))
        return module.forward

    torch._dynamo.reset()
    result = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args)
    [(graph, records)] = seen
    return result, graph, records


def text(graph: Graph) -> str:
    lines = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            target = node.target if isinstance(node.target, str) else node.target.__name__
            arguments = ", ".join(map(str, node.args))
            lines.append(f"{node.name} = {target}({arguments})".replace("self_modules", ""))
    return "\n".join(lines).replace("l__", "").replace("_parameters_", "").replace("l_x_", "x")


def test_graph_before_and_after():
    block, x = Block(), torch.randn(5, 8)
    _, before, _ = run(block, x, passes=())
    _, after, [record] = run(block, x)
    assert_expected_inline(
        before,
        """\
linear = linear(x, qweight_, qbias_)
q = relu(linear)
linear_1 = linear(q, outweight_, None)
linear_2 = linear(x, kweight_, None)""",
    )
    assert_expected_inline(
        after,
        """\
linear_3 = linear(x, [qweight_, kweight_], [qbias_, None])
narrow = narrow(linear_3, 1, 0, 6)
q = relu(narrow)
linear_4 = linear(q, [outweight_], [None])
narrow_2 = narrow(linear_4, 1, 0, 8)
narrow_1 = narrow(linear_3, 1, 6, 4)""",
    )
    assert record.name == "merge_linears"


def test_reshapes_of_one_input_are_one_input():
    """As a router reads rows and an expert beside it the sequence; not other rows, or bits."""

    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        rows = F.linear(x.reshape(-1, 8), a)
        whole = F.linear(x, b)
        flat = F.linear(x.flatten(0, 1).view(3, 2, 8), b)
        others = F.linear(x.reshape(-1, 4), c).reshape(6, -1)
        bits = F.linear(x.view(torch.int32).view(torch.float32), b)
        return torch.cat([t.reshape(6, -1) for t in (rows, whole, flat, bits)] + [others], 1)

    weights = torch.randn(5, 8), torch.randn(4, 8), torch.randn(4, 4)
    graph = assert_unchanged_values(fn, torch.randn(2, 3, 8), *weights)
    assert graph.count("= linear(") == 3


def test_results_of_odd_widths_come_last():
    """A gate of one column would have all after it begin where products write slowly."""

    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.linear(x, a) + F.linear(x, b).sum(1, keepdim=True) + F.linear(x, c)

    weights = torch.randn(1, 8), torch.randn(ALIGNED, 8), torch.randn(2 * ALIGNED, 8)
    graph = assert_unchanged_values(fn, torch.randn(3, 8), *weights)
    assert "linear_3 = linear(x, [l_b_, l_c_, l_a_], [None, None, None])" in graph
    assert f"= narrow(linear_3, 1, {3 * ALIGNED}, 1)" in graph


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8), (2, 3, 4, 8), (1, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(shape: tuple[int, ...], dtype: torch.dtype):
    block, x = Block().to(dtype), torch.randn(shape, dtype=dtype)
    merged, graph, _ = run(block, x)
    assert graph.count("= linear(") == 2
    for ours, plain in zip(merged, block(x), strict=True):
        assert ours.shape == plain.shape
        assert (ours - plain).abs().max() < 8 * torch.finfo(dtype).eps


def assert_unchanged_values(fn: Callable[..., Tensor], *args: Tensor) -> str:
    expected = fn(*(arg.clone() for arg in args))
    actual, graph, _ = run(fn, *args)
    assert (actual - expected).abs().max() < 1e-5
    return graph


def test_layers_of_weights_with_scales_take_others_beside_them():
    """Where one implementation takes both; the order of columns is not that of the layers."""

    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor, scales: Tensor) -> Tensor:
        first = F.linear(x, a)
        second = linear(x, [b], [None], scales=[scales], impl="triton_fp8")
        third = linear(x, [c], [None], scales=[scales], impl="triton_fp8")
        return torch.cat((first, second, third), 1)

    numbers = torch.randn(2, 5, 8).to(torch.float8_e4m3fn)
    args = torch.randn(3, 8), torch.randn(4, 8), *numbers, torch.ones(1, 1)
    with mock.patch.dict(IMPLEMENTATIONS, {"triton_fp8": IMPLEMENTATIONS["torch"]}):
        graph = assert_unchanged_values(fn, *args)
    assert_expected_inline(
        graph,
        """\
linear_1 = linear(x, [l_b_, l_c_, l_a_], [None, None, None])
narrow_2 = narrow(linear_1, 1, 10, 4)
narrow = narrow(linear_1, 1, 0, 5)
narrow_1 = narrow(linear_1, 1, 5, 5)
cat = cat((narrow_2, narrow, narrow_1), 1)""",
    )


def test_weight_that_is_computed_between_the_layers():
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, a)
        return y + F.linear(x, b * 2)

    assert_unchanged_values(fn, torch.randn(3, 8), torch.randn(4, 8), torch.randn(4, 8))


@pytest.mark.parametrize("write", ["method", "operator", "item", "view"])
def test_input_that_is_written_between_the_layers(write: str):
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = x * 1
        y = F.linear(x, a)
        if write == "method":
            x.add_(1)
        elif write == "operator":
            alias = x
            alias += 1
        elif write == "item":
            x[0] = 1
        else:
            x.view(-1)[:4].mul_(3)
        return y + F.linear(x, b)

    assert_unchanged_values(fn, torch.randn(3, 8), torch.randn(4, 8), torch.randn(4, 8))


def test_arguments_by_name():
    def fn(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight=a, bias=bias) + F.linear(input=x, weight=b, bias=bias)

    args = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4, 8), torch.randn(4)
    assert_unchanged_values(fn, *args)


def test_what_the_op_does_not_take_is_left_alone():
    def vector(x: Tensor, a: Tensor) -> Tensor:
        return F.linear(x, a)

    def transposed(x: Tensor, a: Tensor) -> Tensor:
        return F.linear(x, a.t())

    assert_unchanged_values(vector, torch.randn(8), torch.randn(4, 8))
    assert_unchanged_values(transposed, torch.randn(3, 8), torch.randn(8, 4))
    assert_unchanged_values(vector, torch.randn(8, 3).t(), torch.randn(4, 8))
    run(vector, torch.randn(3, 8).double(), torch.randn(4, 8).double())


def small_module() -> GraphModule:
    class Relu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu()

    return torch.fx.symbolic_trace(Relu())


def test_switched_off_by_name():
    names = [graph_pass.name for graph_pass in DEFAULT_PASSES]
    assert names == [
        "merge_linears",
        "interleave_halves",
        "own_routers",
        "own_top_k",
        "narrow_products",
        "index_rotations",
    ]
    assert [p.name for p in without(DEFAULT_PASSES, names[:2])] == names[2:]
    assert without(DEFAULT_PASSES, names) == ()
    with pytest.raises(ValueError, match=r"^no pass is named \['two'\]; there are \['merge_"):
        without(DEFAULT_PASSES, ["two"])


def test_a_pass_that_breaks_the_graph_is_named():
    def use_before_definition(graph: Graph) -> None:
        x, relu, _ = graph.nodes
        relu.append(x)

    passes = [Pass("harmless", lambda graph: None), Pass("careless", use_before_definition)]
    with pytest.raises(RuntimeError, match=r"^pass careless broke the graph: "):
        apply_passes(small_module(), passes)


def test_a_pass_that_refuses_the_graph_is_named():
    def refuse(graph: Graph) -> None:
        raise RuntimeError("the halves differ")

    with pytest.raises(RuntimeError, match=r"^pass picky failed: the halves differ$"):
        apply_passes(small_module(), [Pass("picky", refuse)])


def test_the_diff_of_a_pass():
    def fn(x: Tensor, a: Tensor) -> Tensor:
        return F.linear(x, a).relu()

    def gelu(graph: Graph) -> None:
        [relu] = [node for node in graph.nodes if node.target == "relu"]
        relu.target = "gelu"

    def backend(module: GraphModule, _inputs: object) -> Callable[..., object]:
        texts = {"none": lambda graph: None, "gelu": gelu}
        unchanged, changed = apply_passes(
            module, [Pass(name, apply, keep_text=True) for name, apply in texts.items()]
        )
        assert unchanged.diff() == ""
        assert_expected_inline(
            changed.diff(),
            """\
--- before
+++ gelu
@@ -1,2 +1,2 @@
   linear = torch._C._nn.linear(l_x_, l_a_)
-  relu = relu(linear)
+  relu = gelu(linear)""",
        )
        return lambda *args: args[:1]

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(torch.randn(3, 8), torch.randn(4, 8))


def test_merged_layers_stay_in_their_half():
    """Both halves read other inputs, and what is made of their layers carries their marks."""

    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        outputs = []
        for index in (0, 1):
            with in_half(index):
                rows = x[index]
                outputs.append(F.linear(rows, a) + F.linear(rows, b))
        return torch.cat(outputs)

    seen: list[str] = []

    def backend(module: GraphModule, _inputs: object) -> Callable[..., object]:
        apply_passes(module, [MERGE])
        seen.append(graph_text(module.graph))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    compiled(torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(4, 8))
    lines = seen[0].splitlines()
    merged = [line for line in lines if "linear(" in line]
    assert [line[0] for line in merged] == ["a", "b"]
    assert [line for line in lines if line[0] == " "] == lines[-1:]


def test_records_count_nodes():
    def double(graph: Graph) -> None:
        _, relu, output = graph.nodes
        with graph.inserting_after(relu):
            again = graph.call_method("relu", (relu,))
        output.args = (again,)

    module = small_module()
    [record] = apply_passes(module, [Pass("double", double)])
    assert record == PassRecord(name="double", nodes_before=3, nodes_after=4)
    assert "relu_1" in module.code
