"""The pass that starts mixers on a second stream: what it picks, what it writes, equal values.

On a CPU the two ops of a start and its join run in turn; the order is that of a GPU.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Graph

from tests.graphs.test_schedule import (
    arguments,
    conv,
    in_halves,
    schedule,
    trace,
    trace_model,
    two_layers,
)
from tests.tiny_models import make_model
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass, apply_passes, graph_text
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.graphs.side_stream import mixers_on_side_stream
from torch_hybrid.models.load import adapt

on_a_cpu = partial(mixers_on_side_stream, devices=("cpu",))
PASSES = [
    Pass(p.name, on_a_cpu) if p.name == "mixers_on_side_stream" else p for p in DEFAULT_PASSES
]


def starts(graph: Graph) -> list[str]:
    """The ops that are started, in order."""
    return re.findall(r"torch_hybrid\.(\w+)\.on_side_stream", graph_text(graph))


def test_a_mixer_of_one_half_runs_beside_the_matrix_products_of_the_other():
    traced = trace(in_halves(two_layers), *arguments())
    expected, expected_inputs = traced.run()
    on_a_cpu(traced.module.graph)
    assert_expected_inline(
        schedule(traced.module.graph),
        """\
a0   linear, causal_conv1d
b0                                           linear, causal_conv1d
a1   join_side_stream, linear, causal_conv1d
b1                                           join_side_stream, linear, causal_conv1d
a2   join_side_stream, linear
b2                                           join_side_stream, linear""",
    )
    actual, inputs = traced.run()
    assert torch.equal(actual, expected)
    for ours, theirs in zip(inputs, expected_inputs, strict=True):
        assert torch.equal(ours, theirs)


def test_the_text_of_the_pass():
    traced = trace(in_halves(two_layers), *arguments())
    [record] = apply_passes(traced.module, [Pass("beside", on_a_cpu)], keep_text=True)
    changed = "\n".join(line for line in record.diff().splitlines() if line[:2] in ("+a", "-a"))
    assert_expected_inline(
        re.sub(r"\((\w+), [^\[\]\n]*\)", r"(\1, ...)", changed),
        """\
-a out = torch.ops.torch_hybrid.causal_conv1d.default(tensor_2, ...)
+a out = torch.ops.torch_hybrid.causal_conv1d.on_side_stream(tensor_2, ...)
+a join_side_stream_default = torch.ops.torch_hybrid.join_side_stream.default([out])
-a out_1 = torch.ops.torch_hybrid.causal_conv1d.default(tensor_6, ...)
+a out_1 = torch.ops.torch_hybrid.causal_conv1d.on_side_stream(tensor_6, ...)
+a join_side_stream_default_1 = torch.ops.torch_hybrid.join_side_stream.default([out_1])""",
    )


def test_only_the_last_mixer_before_a_matrix_product_is_started():
    """The convolution's result is read at once: there is nothing to run beside it."""
    graph = trace_model("qwen3_next_dense", [70, 3]).module.graph
    on_a_cpu(graph)
    assert starts(graph) == ["chunk_gated_delta_rule", "paged_attention"] * 2


def test_an_op_whose_pool_is_used_on_the_main_stream_stays_there():
    def half(x: Tensor, a: Tensor, b: Tensor, pool: Tensor, other: Tensor) -> Tensor:
        x = conv(F.linear(x, a), pool, 1) + pool.sum()
        return F.linear(conv(F.linear(x, b), other, 1), a)

    graph = trace(in_halves(half), *arguments()).module.graph
    on_a_cpu(graph)
    pools = re.findall(r"on_side_stream\([^)]*(l_shared_\d_)", graph_text(graph))
    assert pools == ["l_shared_3_"] * 2


@pytest.mark.parametrize("lengths", [[70, 3], [1, 1]], ids=str)
def test_steps_without_halves_and_on_other_devices_stay_as_they_are(lengths: list[int]):
    whole = trace(two_layers, torch.randn(5, 8), *arguments()[1:]).module.graph
    halves = trace_model("qwen3_next_dense", lengths).module.graph
    for graph, apply in ((whole, on_a_cpu), (halves, mixers_on_side_stream)):
        before = graph_text(graph)
        apply(graph)
        assert graph_text(graph) == before


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next_dense", "kimi_linear", "falcon_h1"])
def test_compiled_steps_are_bitwise_those_without(family: str):
    """One graph, the starts and joins in the generated code in the schedule's order."""
    model = adapt(make_model(family, seed=4))
    sizes = {"max_seqs": 4, "max_tokens": 128, "kv_tokens": 256, "two_batch_overlap": "on"}
    outputs = []
    for passes in (DEFAULT_PASSES, PASSES):
        runner = Runner(model, **sizes, passes=passes)
        seqs = runner.new_sequences(3)
        steps = [[[5] * 70, [7] * 3, [9]], [[1], [2], [3]], [[4] * 3, [1], [2]]]
        outputs.append([runner.extend(seqs, tokens) for tokens in steps])
        report = runner.report()
        assert (report.recompiles, report.graph_breaks, report.pool_clones) == (0, 0, ())
    names = [op for g in report.graphs.values() for s in g.schedule for op in s.ops]
    assert names.count("join_side_stream") >= 4
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
