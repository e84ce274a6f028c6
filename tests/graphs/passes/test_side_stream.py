"""The pass that starts mixers on a second stream: what it picks, what it writes, equal values.

On a CPU the two ops of a start and its join run in turn; the order is that of a GPU.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Graph

from tests.devices import needs_cuda
from tests.graphs.passes.test_schedule import schedule
from tests.graphs.traced import arguments, conv, in_halves, trace, trace_model, two_layers
from tests.ops.registered import public_ops
from tests.tiny_models import make_hybrid, make_model
from torch_hybrid.graphs.capturing.cuda_graph import CapturedSteps
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass, apply_passes, graph_text, without
from torch_hybrid.graphs.passes.side_stream import mixers_on_side_stream
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.models.adapt import adapt
from torch_hybrid.ops.core import side_stream
from torch_hybrid.ops.core.side_stream import _SideStream, join_side_stream

on_a_cpu = partial(mixers_on_side_stream, devices=("cpu",))


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


@pytest.mark.parametrize("count", [1, 2])
def test_opcheck_of_the_join(count: int):
    """It is declared to write what it waits for."""
    results = [torch.randn(5, 3) for _ in range(count)]
    expected = [result.clone() for result in results]
    torch.library.opcheck(join_side_stream, (results,))
    assert all(map(torch.equal, results, expected))
    assert_expected_inline(
        str(join_side_stream._schema),
        """torch_hybrid::join_side_stream(Tensor(a!)[] results) -> ()""",
    )


def test_an_op_declares_the_same_on_either_stream():
    """Its pools are written on the side stream as they are on the main one."""
    for name in public_ops():
        packet = getattr(torch.ops.torch_hybrid, name)
        beside = str(packet.on_side_stream._schema)
        assert beside == str(packet.default._schema).replace("(", ".on_side_stream(", 1)


def test_opcheck_on_the_side_stream():
    rows, slot = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    pool = torch.randn(3, 3, 8)
    args = (torch.randn(5, 8), torch.randn(8, 4), None, pool, rows, slot * 0, slot)
    options = {"activation": "silu", "impl": "torch"}
    op = torch.ops.torch_hybrid.causal_conv1d
    torch.library.opcheck(op.on_side_stream, args, options)
    copies = [x.clone() if isinstance(x, Tensor) else x for x in args]
    assert torch.equal(op.on_side_stream(*args, **options), op.default(*copies, **options))
    assert torch.equal(pool, copies[3])


def test_the_text_of_the_pass():
    traced = trace(in_halves(two_layers), *arguments())
    [record] = apply_passes(traced.module, [Pass("beside", on_a_cpu, keep_text=True)])
    changed = "\n".join(line for line in record.diff().splitlines() if line[:2] in ("+a", "-a"))
    assert_expected_inline(
        re.sub(r"\((\w+), [^\[\]\n]*\)", r"(\1, ...)", changed).replace("conv1d_default", "conv"),
        """\
-a causal_conv = torch.ops.torch_hybrid.causal_conv1d.default(linear, ...)
+a causal_conv = torch.ops.torch_hybrid.causal_conv1d.on_side_stream(linear, ...)
+a join_side_stream_default = torch.ops.torch_hybrid.join_side_stream.default([causal_conv])
-a x_1 = torch.ops.torch_hybrid.causal_conv1d.default(add, ...)
+a x_1 = torch.ops.torch_hybrid.causal_conv1d.on_side_stream(add, ...)
+a join_side_stream_default_1 = torch.ops.torch_hybrid.join_side_stream.default([x_1])""",
    )


def test_only_the_last_mixer_before_a_matrix_product_is_started():
    """The convolution's result is read at once: there is nothing to run beside it."""
    graph = trace_model(make_hybrid("qwen3_next_dense"), [70, 3]).module.graph
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
    halves = trace_model(make_hybrid("qwen3_next_dense"), lengths).module.graph
    for graph, apply in ((whole, on_a_cpu), (halves, mixers_on_side_stream)):
        before = graph_text(graph)
        apply(graph)
        assert graph_text(graph) == before


STEPS = [[[5] * 70, [7] * 3, [9]], [[1], [2], [3]], [[4] * 3, [1] * 90, [2]], [[4], [1], [2]]]


def make_gpu_runner(family: str, **options: Any) -> Runner:
    torch._dynamo.reset()
    model = adapt(make_model(family, seed=4).cuda())
    sizes = {"max_seqs": 4, "max_tokens": 256, "kv_tokens": 512}
    return Runner(model, **sizes, two_batch_overlap="on", **options)


def serve_steps(runner: Runner) -> Tensor:
    """All logits of fresh sequences that are led through the steps."""
    seqs = runner.new_sequences(3)
    logits = [runner.extend(seqs, tokens, logits="all") for tokens in STEPS]
    runner.free(seqs)
    return torch.cat(logits)


def on_the_same_stream(device: torch.device) -> _SideStream:
    """The current stream in place of the side stream."""
    return _SideStream(torch.cuda.current_stream(device), side_stream._SIDE_STREAMS[device].running)


def wait_long(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """``wait_stream``, and then some."""
    stream.wait_event(other.record_event())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(300_000)


@needs_cuda
@pytest.mark.parametrize("family", ["qwen3_next_dense", "kimi_linear", "falcon_h1", "minimax"])
def test_two_streams_are_bitwise_one(family: str, monkeypatch: pytest.MonkeyPatch):
    """The same compiled steps, captured where all ops can be, over many replays, with a sequence
    that is cut: also where the side stream is late, so that what does not wait for it reads too
    early."""
    runner = make_gpu_runner(family)
    expected = serve_steps(runner)
    assert expected.isfinite().all()
    served = {"two streams": [serve_steps(runner) for _ in range(20)]}
    others = {
        "one stream": (side_stream, "_side_stream", on_the_same_stream),
        "late": (torch.cuda.Stream, "wait_stream", wait_long),
    }
    for name, patched in others.items():
        runner._capture._steps = CapturedSteps(runner.model.device)  # captures its steps anew
        with monkeypatch.context() as patch:
            patch.setattr(*patched)
            served[name] = [serve_steps(runner) for _ in range(3)]
    errors = {
        name: max((logits - expected).abs().max().item() for logits in all_logits)
        for name, all_logits in served.items()
    }
    assert errors == dict.fromkeys(errors, 0.0)


@needs_cuda
def test_a_captured_step_has_two_branches():
    """Kernels of its replay run on several streams: a branch may go from one to another."""
    counts = []
    for switched_off in ([], ["mixers_on_side_stream"]):
        passes = without(DEFAULT_PASSES, switched_off)
        runner = make_gpu_runner("qwen3_next_dense", passes=passes)
        serve_steps(runner)
        assert runner.report().not_captured == {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            serve_steps(runner)
            torch.cuda.synchronize()
        mixers = [event for event in seen.events() if event.name == "_scan_kernel"]
        products = [event for event in seen.events() if "gemm" in event.name]
        streams = [{event.device_resource_id for event in of} for of in (mixers, products)]
        counts.append(len(set.union(*streams)))
    assert counts[0] > counts[1] == 1
