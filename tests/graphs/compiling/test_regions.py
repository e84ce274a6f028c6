"""Regions: where a graph is cut, which regions are one, and that joined they are the graph."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.graphs.compiling.test_layers_once import WIDTH, Layer, Stack
from torch_hybrid.graphs.compiling.compile import CompileLog, StepBackend, compile_step
from torch_hybrid.graphs.compiling.instantiate import mark_layers, own_copy
from torch_hybrid.graphs.compiling.layers_once import LayersOnce
from torch_hybrid.graphs.compiling.regions import RegionPlan, cut, link, plan_regions, step_text
from torch_hybrid.graphs.passes import graph_text
from torch_hybrid.graphs.passes.marks import set_stage
from torch_hybrid.graphs.passes.values import value_of

NUM_LAYERS = 5


class NormLayer(Layer):
    """A norm, two products, and the residual's sum."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.out(torch.tanh(self.proj(normed)))


class AutocastLayer(NormLayer):
    """Its last product is inside a context."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.out(torch.tanh(self.proj(x)))
            return x + y


class PartsLayer(NormLayer):
    """It reads slices of a product and of a sum, and both results of one call."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.out = nn.Linear(WIDTH, WIDTH + 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.out(torch.tanh(self.proj(x)))
        most, place = torch.max(wide + 1, -1, keepdim=True)
        return wide[:, 1:] * most + wide.tanh().split([WIDTH, 1], -1)[0] + place


class SliceLayer(NormLayer):
    """It slices its sum by a size that is there before all layers."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[-y.shape[0] :] * 2


def stack_of(layer: Callable[[int], nn.Module] = NormLayer) -> Stack:
    return Stack(*map(layer, range(NUM_LAYERS)))


def planned(model: Stack, x: Tensor) -> tuple[GraphModule, RegionPlan, list[Any]]:
    """A trace of a model, its regions, and the inputs of the graph."""
    found: list[Any] = []

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def capture(*args: Any) -> Any:
            found.extend([module, list(args)])
            return module(*args)

        return capture

    torch._dynamo.reset()
    with torch.inference_mode(), torch._dynamo.config.patch(specialize_float=True):
        torch.compile(lambda x: model(x), backend=backend, fullgraph=True, dynamic=True)(x)
    module = own_copy(found[0])
    mark_layers(module.graph, [f"layers.{i}" for i in range(len(model.layers))])
    return module, plan_regions(module.graph), found[1]


def uncompiled(region: GraphModule) -> Callable[[list[Any]], Any]:
    return lambda boxed: region(*boxed)


def joined(module: GraphModule, plan: RegionPlan, run: list[Callable[[list[Any]], Any]]) -> Any:
    return link(step_text(module.graph, plan), run)


def test_a_cut_leaves_the_residual_and_the_norm_together():
    module, plan, _ = planned(stack_of(), torch.randn(4, WIDTH))
    assert plan.counts == (1, NUM_LAYERS - 1, 1)
    assert_expected_inline(
        graph_text(plan.distinct[1].module(module).graph).replace("  ", ""),
        """\
x_1 = operator.add(x, linear_2)
pow_2 = pow(x_1, 2)
mean_1 = mean(pow_2, -1, keepdim=True)
add_2 = operator.add(mean_1, 1e-06)
rsqrt_1 = torch.rsqrt(add_2)
normed_1 = operator.mul(x_1, rsqrt_1)
linear_3 = torch._C._nn.linear(normed_1, l_model_modules_layers_modules_1_modules_proj_parameters_weight_, l_model_modules_layers_modules_1_modules_proj_parameters_bias_)
tanh_1 = torch.tanh(linear_3)
linear_4 = torch._C._nn.linear(tanh_1, l_model_modules_layers_modules_1_modules_out_parameters_weight_, None)""",  # noqa: E501
    )


@pytest.mark.parametrize("layer", [NormLayer, AutocastLayer, SliceLayer])
def test_joined_regions_are_the_graph(layer: Callable[[int], nn.Module]):
    module, plan, inputs = planned(stack_of(layer), torch.randn(4, WIDTH))
    with torch.inference_mode():
        run = [uncompiled(region.module(module)) for region in plan.distinct]
        [actual], [expected] = joined(module, plan, run)(*inputs), module(*inputs)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("layer", [NormLayer, PartsLayer])
def test_a_region_gives_whole_tensors(layer: Callable[[int], nn.Module]):
    """Cut at every call, as a schedule may: no views, whose strides Inductor would choose, and no
    tuples."""
    module, _, inputs = planned(stack_of(layer), torch.randn(4, WIDTH))
    for stage, node in enumerate(module.graph.nodes):
        set_stage(node, stage)
    plan = plan_regions(module.graph)
    assert len(plan.regions) > 5 * NUM_LAYERS
    for value in [value_of(node) for region in plan.regions for node in region.outputs]:
        assert value.is_contiguous()
        assert value._base is None
    with torch.inference_mode():
        run = [uncompiled(region.module(module)) for region in plan.distinct]
        assert torch.equal(joined(module, plan, run)(*inputs)[0], module(*inputs)[0])


def test_no_cut_inside_a_context():
    module, _, _ = planned(stack_of(AutocastLayer), torch.randn(4, WIDTH))
    for nodes in cut(module.graph):
        targets = Counter(getattr(node.target, "__name__", "") for node in nodes)
        assert targets["_enter_autocast"] == targets["_exit_autocast"]


def test_a_region_holds_nothing_that_is_read_no_more():
    """All that is made is freed before the region runs that reads it last."""
    module, plan, inputs = planned(stack_of(), torch.randn(4, WIDTH))
    alive: list[int] = []

    def run(region: GraphModule) -> Callable[[list[Any]], Any]:
        def call(boxed: list[Any]) -> Any:
            results = region(*boxed)
            boxed.clear()
            alive.append(sum(ref() is not None for ref in made))
            made.extend(weakref.ref(result) for result in results)
            return results

        return call

    made: list[weakref.ref[Tensor]] = []
    step = joined(module, plan, [run(r.module(module)) for r in plan.distinct])
    with torch.inference_mode():
        step(*inputs)
    assert max(alive) == 0


class Different:
    """What makes two layers two regions, although their calls have the same names."""

    @staticmethod
    def a_constant(model: Stack) -> None:
        model.layers[2].statics = type(model.layers[2].statics)(0.125)

    @staticmethod
    def the_strides_of_a_weight(model: Stack) -> None:
        weight = model.layers[2].proj.weight
        weight.data = torch.randn(WIDTH, WIDTH).t()

    @staticmethod
    def no_bias(model: Stack) -> None:
        model.layers[2].proj.bias = None

    @staticmethod
    def the_shape_of_a_weight(model: Stack) -> None:
        model.layers[2].proj.bias = nn.Parameter(torch.randn(1), requires_grad=False)

    @staticmethod
    def weights_that_are_one(model: Stack) -> None:
        """Of two weights, where other layers have two."""
        model.layers[2].out = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        model.layers[2].out.weight = model.layers[2].proj.weight


class ScaledLayer(NormLayer):
    def forward(self, x: Tensor) -> Tensor:
        bias = self.proj.bias
        inner = F.linear(x, self.proj.weight) + (0 if bias is None else bias)
        return x + self.out(torch.tanh(inner * self.statics.scale))


DIFFERENCES = [name for name in vars(Different) if not name.startswith("__")]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_regions_that_differ_are_two(name: str):
    model = stack_of(ScaledLayer)
    _, plan, _ = planned(model, torch.randn(4, WIDTH))
    assert plan.counts == (1, NUM_LAYERS - 1, 1)
    getattr(Different, name)(model)
    module, plan, inputs = planned(model, torch.randn(4, WIDTH))
    assert sorted(plan.counts) == [1, 1, 1, NUM_LAYERS - 2]
    with torch.inference_mode():
        run = [uncompiled(region.module(module)) for region in plan.distinct]
        assert torch.equal(joined(module, plan, run)(*inputs)[0], module(*inputs)[0])


@pytest.fixture(scope="module")
def compiled() -> tuple[Stack, Callable[..., Tensor], CompileLog]:
    """A model of which one layer of each kind is compiled."""
    torch._dynamo.reset()
    model, log = stack_of(), CompileLog()
    layers = LayersOnce(model, {})
    step = compile_step(
        lambda inputs, caches: model(inputs), StepBackend(log, pool_sizes=(), layers=layers)
    )
    with torch.inference_mode(), torch._dynamo.config.patch(specialize_float=True):
        layers.trace(lambda: step(torch.randn(4, WIDTH), None))
    return model, step, log


def test_each_distinct_region_is_compiled_once(
    compiled: tuple[Stack, Callable[..., Tensor], CompileLog],
):
    model, step, log = compiled
    [graph] = log.graphs
    assert graph.regions == (1, NUM_LAYERS - 1, 1)
    assert (graph.layers.traced, graph.layers.copied) == (3, 2)
    assert sum(graph.ops.values()) in (0, 1 + 2 * NUM_LAYERS)  # without and with a C++ compiler
    with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
        for num_rows in (2, 3, 4, 17):
            x = torch.randn(num_rows, WIDTH)
            assert (step(x, None) - model(x)).abs().max() < 1e-5


def test_weights_that_are_loaded_in_place_are_seen(
    compiled: tuple[Stack, Callable[..., Tensor], CompileLog],
):
    model, step, _ = compiled
    gc.collect()  # what Inductor returned is held by the step alone
    with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
        x = torch.randn(4, WIDTH)
        before = step(x, None)
        model.layers[-1].out.weight.mul_(2)  # of a copied layer
        assert (step(x, None) - before).abs().max() > 0.01
        assert (step(x, None) - model(x)).abs().max() < 1e-5
