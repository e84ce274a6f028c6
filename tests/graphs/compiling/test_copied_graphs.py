"""A graph with copied layers is, call by call, the graph of a trace of all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import torch_hybrid as th
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, make_hybrid, make_model
from torch_hybrid.graphs.compiling.compile import StepBackend
from torch_hybrid.graphs.compiling.compiled_step import Arguments, CompiledGraph
from torch_hybrid.graphs.compiling.instantiate import Named
from torch_hybrid.graphs.compiling.layers_once import LayersOnce
from torch_hybrid.graphs.passes.marks import layer_of

LINEAR_FIRST = ["linear_attention", "full_attention"] * 2
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3},
    "deepseek_v3": {"first_k_dense_replace": 2},
    "nemotron_h": {
        "layer_types": ["moe", "linear_attention", "mlp", "full_attention", "moe", "mlp"]
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 0},
    "lfm3": {"layer_types": ["conv", "sliding_attention"] * 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "inkling": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "mlp_layer_types": ["sparse"] * 4},
    "inkling2": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 4,
        "num_hidden_layers": 8,
        "n_layers_per_attn_res_block": 2,
    },
    # Four passes of the second layer: the last one is a copy.
    "inkling2_loop": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "num_hidden_layers": 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 4,
    },
    "zamba2": {"layers_block_type": ["linear_attention", *["hybrid"] * 3]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"] * 3, "num_hidden_layers": 6},
    "zamba": {"layers_block_type": ["linear_attention", *["hybrid"] * 3]},
    "jamba": {"attn_layer_period": 2},
}
# The others: python -m tests.graphs.compiling.test_copied_graphs
FAMILIES = ["qwen3_next", "zamba2", *({"inkling2_loop"} & BUILDERS.keys())]


def model_of(family: str) -> th.HybridModel:
    if family == "nemotron_h":
        return th.adapt(make_model(family, **OPTIONS[family]))
    options = {"num_hidden_layers": 4} | OPTIONS.get(family, {})
    if "layer_types" not in FEWEST_LAYERS[family]:
        return th.adapt(make_model(family, **options))
    return make_hybrid(family, **{"layer_types": LINEAR_FIRST} | options)


def lines_of(module: GraphModule, names: dict[int, str], added: Sequence[Tensor]) -> list[str]:
    """One line a call: op, arguments, shape, layer and marks; inputs by what they stand for."""
    shown: dict[Node, str] = {}
    lines: list[str] = []
    left = list(added)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            shown[node] = name_of(node, names, left)
            continue
        target = node.target if isinstance(node.target, str) else repr(node.target)
        given = map_arg((node.args, node.kwargs), lambda n: Named(shown[n]))
        value = node.meta.get("example_value")
        layout = (tuple(value.shape), value.stride()) if isinstance(value, Tensor) else ""
        lines.append(f"{target} {given} {layout} {layer_of(node)} {node.meta.get('custom')}")
        shown[node] = f"%{len(lines)}"
    return lines


def name_of(node: Node, names: dict[int, str], added: list[Tensor]) -> str:
    if "grapharg" not in node.meta:
        return names[id(added.pop(0))]
    example = node.meta["grapharg"].example
    return names.get(id(example), node.name) if isinstance(example, Tensor) else node.name


def traced(model: th.HybridModel, *, whole: bool, **options: Any) -> tuple[list[str], list[int]]:
    """The lines of a model's graphs, and how many layers were copied in each."""
    runner = th.Runner(model, max_seqs=4, max_tokens=128, kv_tokens=256, **options)
    runner._steps.layers._is_checked = (
        True  # each kind is traced once, so that there is more to copy
    )
    names = {
        id(tensor): f"{name} of {index}"
        for index, own in enumerate(runner._steps.layers._layers.tensors)
        for name, tensor in own.items()
    }
    lines: list[str] = []

    def compile(
        _backend: StepBackend, module: GraphModule, _schedule: object, added: Sequence[Tensor]
    ) -> CompiledGraph:
        lines.extend(lines_of(module, names, added))
        return CompiledGraph(
            arguments=Arguments(given=()),
            call=lambda *_: (torch.zeros(1),),
        )

    def trace(_layers: LayersOnce, step: Callable[[], object]) -> None:
        step()

    torch._dynamo.reset()
    with mock.patch.object(StepBackend, "_compile", compile):
        if whole:
            with mock.patch.object(LayersOnce, "trace", trace):
                runner.warm_up()
        else:
            runner.warm_up()
    return lines, [graph.layers.copied for graph in runner.report().graphs.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_copied_graph_is_the_traced_one(family: str):
    """In halves: each of a layer's two calls is copied from a call of its own half."""
    model, options = model_of(family), {"two_batch_overlap": "on", "prefill": False}
    expected, copied = traced(model, whole=True, **options)
    assert not any(copied)
    lines, copied = traced(model, whole=False, **options)
    assert all(copied)
    assert lines == expected


if __name__ == "__main__":
    for name in BUILDERS:
        first, _ = traced(model_of(name), whole=True)
        second, copied = traced(model_of(name), whole=False)
        print(name, first == second, copied, len(first), flush=True)
