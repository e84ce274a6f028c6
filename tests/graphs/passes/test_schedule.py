"""The schedule: pinned as text, a permutation that keeps values, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Graph

from tests.errors import error_text
from tests.graphs import overlap_jobs
from tests.graphs.traced import (
    WIDTH,
    Step,
    arguments,
    check_values,
    conv,
    in_halves,
    trace,
    trace_model,
    two_layers,
)
from tests.parallel import processes
from tests.tiny_models import BUILDERS, EACH_KIND, FEWEST_LAYERS, kinds_of, make_hybrid, make_model
from torch_hybrid.graphs.compiling.compile import CompileLog, StepBackend, compile_step
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass, apply_passes
from torch_hybrid.graphs.passes.marks import half_of, in_half
from torch_hybrid.graphs.passes.schedule import Stage, interleave_halves, read_schedule
from torch_hybrid.models.adapt import adapt

# And layers of feed-forward alone: a schedule sees ops and what they write, and other families have
# no others.
FAMILIES = (*EACH_KIND, "nemotron_h")
# With each op that only steps of one token have; the others of these have those of their prompts.
DECODED = ("qwen3_next", "falcon_h1", "glm5_next", "minimax")
STEPS = [
    *((family, [70, 3]) for family in FAMILIES),
    *((family, [1, 1, 1]) for family in DECODED),
]


def schedule(graph: Graph, offset: int | None = None) -> str:
    interleave_halves(graph, offset=offset)
    graph.lint()
    return drawn(read_schedule(graph))


def drawn(stages: tuple[Stage, ...]) -> str:
    return "\n".join(str(stage).rstrip() for stage in stages)


# ---- mixers and matrix products --------------------------------------------------------------


def test_mixers_of_one_half_stand_beside_matrix_products_of_the_other():
    traced = trace(in_halves(two_layers), *arguments())
    assert_expected_inline(
        schedule(traced.module.graph),
        """\
a0   linear
a1   causal_conv1d
b0                                           linear
a2   linear
b1                                           causal_conv1d
a3   causal_conv1d
b2                                           linear
a4   linear
b3                                           causal_conv1d
b4                                           linear""",
    )


def test_offsets():
    traced = trace(in_halves(two_layers), *arguments())
    orders = {}
    for offset in (0, 1, 2, 9):
        interleave_halves(traced.module.graph, offset=offset)
        stages = read_schedule(traced.module.graph)
        orders[offset] = " ".join(str(stage).split()[0] for stage in stages)
    assert orders == {
        0: "a0 b0 a1 b1 a2 b2 a3 b3 a4 b4",
        1: "a0 a1 b0 a2 b1 a3 b2 a4 b3 b4",
        2: "a0 a1 a2 b0 a3 b1 a4 b2 b3 b4",
        9: "a0 a1 a2 a3 a4 b0 b1 b2 b3 b4",
    }


def test_the_schedule_of_a_model():
    """Every family is served so; the forward has one linear and one full layer."""
    traced = trace_model(make_hybrid("qwen3_next_dense"), [70, 3])
    assert_expected_inline(
        schedule(traced.module.graph),
        """\
a0   linear
a1   causal_conv1d, gated_delta_rule
b0                                           linear
a2   7 linear
b1                                           causal_conv1d, gated_delta_rule
a3   paged_attention
b2                                           7 linear
a4   4 linear
b3                                           paged_attention
b4                                           4 linear""",
    )


@pytest.mark.parametrize(("family", "lengths"), STEPS, ids=str)
def test_values_are_bitwise_those_of_the_order_as_traced(family: str, lengths: list[int]):
    traced = trace_model(adapt(make_model(family, **FEWEST_LAYERS[family])), lengths)
    expected, expected_inputs = traced.run()
    scheduled = [[Pass("", partial(interleave_halves, offset=offset))] for offset in (0, 1, 3)]
    for passes in scheduled:
        before = [node.name for node in traced.module.graph.nodes]
        apply_passes(traced.module, passes)
        assert [node.name for node in traced.module.graph.nodes] != before
        actual, inputs = traced.run()
        assert torch.equal(actual, expected)
        for ours, theirs in zip(inputs, expected_inputs, strict=True):
            assert not isinstance(ours, Tensor) or torch.equal(ours, theirs)
    apply_passes(traced.module, DEFAULT_PASSES)
    check_values(traced)


def test_every_kind_of_mixer_is_scheduled_above():
    assert kinds_of(EACH_KIND) == kinds_of(BUILDERS)


def test_each_half_keeps_its_order_and_every_node_is_there_once():
    traced = trace(in_halves(two_layers), *arguments())
    before = list(traced.module.graph.nodes)
    interleave_halves(traced.module.graph)
    after = list(traced.module.graph.nodes)
    assert len(after) == len(before)
    assert set(after) == set(before)
    for index in (0, 1):
        ours = [node for node in after if half_of(node) == index]
        assert ours == [node for node in before if node in set(ours)]


def test_a_step_without_halves_stays_as_it_is():
    traced = trace(two_layers, torch.randn(5, WIDTH), *arguments()[1:])
    before = list(traced.module.graph.nodes)
    assert schedule(traced.module.graph) == ""
    assert list(traced.module.graph.nodes) == before


# ---- collectives -----------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[str]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def reduced(x: Tensor, group: str) -> Tensor:
    started = torch.ops._c10d_functional.all_reduce(x, "sum", group)
    return torch.ops._c10d_functional.wait_tensor(started)


def test_a_collective_of_one_half_is_in_flight_while_the_other_computes(group: str):
    def layers(x: Tensor, a: Tensor, b: Tensor, pool: Tensor, other: Tensor) -> Tensor:
        x = x + reduced(F.linear(conv(F.linear(x, a), pool, 1), b), group)
        return x + reduced(F.linear(x, b), group)

    traced = trace(in_halves(layers), *arguments())
    expected, _ = traced.run()
    assert_expected_inline(
        schedule(traced.module.graph),
        """\
a0   linear, causal_conv1d, linear, all_reduce
b0                                           linear, causal_conv1d, linear, all_reduce
a1   wait_tensor, linear, all_reduce
b1                                           wait_tensor, linear, all_reduce
a2   wait_tensor
b2                                           wait_tensor""",
    )
    assert torch.equal(traced.run()[0], expected)


def test_collectives_come_in_the_order_of_the_stages(group: str):
    """Of one graph there is one order: every rank that traces it starts them alike."""

    def layers(x: Tensor, a: Tensor) -> Tensor:
        for _ in range(3):
            x = reduced(F.linear(x, a), group)
        return x

    orders = []
    for _ in range(2):
        traced = trace(in_halves(layers), torch.randn(2, 5, WIDTH), torch.randn(WIDTH, WIDTH))
        interleave_halves(traced.module.graph)
        starts = [n for n in traced.module.graph.nodes if "all_reduce" in str(n.target)]
        orders.append([(half_of(node), node.name) for node in starts])
    assert orders[0] == orders[1]
    assert [index for index, _ in orders[0]] == [0, 1] * 3


@pytest.mark.slow
def test_compiled_code_keeps_the_order_of_collectives(group: str, monkeypatch: pytest.MonkeyPatch):
    """Inductor calls them as the schedule has them, each wait as late as it stands there, in
    another region than its start."""

    def step(inputs: Tensor, caches: tuple[Tensor, ...]) -> Tensor:
        def layers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            x = x + reduced(F.linear(x, a).relu(), group)
            return x + reduced(F.linear(x, b).tanh(), group)

        return in_halves(layers)(inputs, *caches)

    from torch_hybrid.graphs.passes import keep_order

    codes: list[str] = []
    monkeypatch.setattr(keep_order, "check_order", lambda code, planned: codes.append(code))
    log = CompileLog()
    backend = StepBackend(log, pool_sizes=())
    x, a, b = torch.randn(2, 5, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    with torch.inference_mode():
        actual = compile_step(step, backend)(x, (a, b))
    assert (actual - step(x, (a, b))).abs().max() < 1e-5
    [graph] = log.graphs
    assert drawn(graph.schedule).count("all_reduce") == 4
    assert sum(graph.regions) > 4
    calls = re.findall(r"_c10d_functional\.(all_reduce|wait_tensor)_?\.default\(", codes[0])
    assert calls == ["all_reduce"] * 2 + ["wait_tensor", "all_reduce"] * 2 + ["wait_tensor"] * 2


@pytest.fixture(scope="module")
def ranks() -> list[tuple[overlap_jobs.Served, tuple[int, list[int]]]]:
    """What two ranks saw: starting them, and their first trace, takes as long as the others."""
    return processes.results(processes.run_ranks(overlap_jobs.serve_all, 2, limit_s=300.0))


def test_two_ranks_serve_a_shared_model_by_one_schedule(ranks):
    served = [served for served, _ in ranks]
    assert served[0] == served[1]
    assert served[0].error < 2e-5
    assert served[0].halves_of_collectives[:4] == [0, 1, 0, 1]
    assert_expected_inline(
        served[0].schedule,
        """\
a0   linear, causal_conv1d, gated_delta_rule, linear, all_reduce
b0                                           linear, causal_conv1d, gated_delta_rule, linear, all_reduce
a1   wait_tensor, 2 linear, all_reduce
b1                                           wait_tensor, 2 linear, all_reduce
a2   wait_tensor, linear, paged_attention, linear, all_reduce
b2                                           wait_tensor, linear, paged_attention, linear, all_reduce
a3   wait_tensor, 2 linear, all_reduce
b3                                           wait_tensor, 2 linear, all_reduce
a4   wait_tensor
b4                                           wait_tensor""",  # noqa: E501
    )


def test_experts_of_one_token_need_no_graph_of_their_own_and_their_layers_are_copied(ranks):
    assert [counts for _, counts in ranks] == [(0, [0, 1])] * 2


# ---- what a cut must not part, and what is refused -------------------------------------------


def test_uses_of_one_pool_are_not_parted():
    def half(x: Tensor, a: Tensor, b: Tensor, pool: Tensor, other: Tensor) -> Tensor:
        x = conv(F.linear(x, a), pool, 1)
        return conv(F.linear(x, b), pool, 2)

    traced = trace(in_halves(half), *arguments())
    assert_expected_inline(
        schedule(traced.module.graph),
        """\
a0   linear
a1   causal_conv1d, linear, causal_conv1d
b0                                           linear
b1                                           causal_conv1d, linear, causal_conv1d""",
    )


def test_a_context_is_not_parted():
    def half(x: Tensor, a: Tensor, b: Tensor, pool: Tensor, other: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = F.linear(x, a)
            x = conv(x.float(), pool, 1)
            x = F.linear(x, b)
        return conv(x.float(), other, 1)

    traced = trace(in_halves(half), *arguments())
    expected, _ = traced.run()
    assert_expected_inline(
        schedule(traced.module.graph),
        """\
a0   linear, causal_conv1d, linear
a1   causal_conv1d
b0                                           linear, causal_conv1d, linear
b1                                           causal_conv1d""",
    )
    assert torch.equal(traced.run()[0], expected)


def refusal(step: Step, *args: Any) -> str:
    traced = trace(step, *args)
    return error_text(RuntimeError, interleave_halves, traced.module.graph)


def test_halves_that_need_each_other():
    def step(x: Tensor, a: Tensor) -> Tensor:
        with in_half(0):
            first = F.linear(x[0], a)
            middle = torch.ops._c10d_functional.wait_tensor(first)
            last = F.linear(middle, a)
        with in_half(1):
            second = F.linear(x[1], a)
            middle = torch.ops._c10d_functional.wait_tensor(second)
            return F.linear(middle, a) + last

    traced = trace(step, torch.randn(2, 5, WIDTH), torch.randn(WIDTH, WIDTH))
    interleave_halves(traced.module.graph)  # the first half comes first here: nothing is wrong

    def crossed(x: Tensor, a: Tensor) -> Tensor:
        with in_half(1):
            first = F.linear(x[0], a).relu()
        with in_half(0):
            return F.linear(first, a).relu()

    assert_expected_inline(
        refusal(crossed, torch.randn(2, 5, WIDTH), torch.randn(WIDTH, WIDTH)),
        """linear_1 of half 0 needs first of half 1, which is scheduled after it""",
    )


def test_halves_that_differ():
    def step(x: Tensor, a: Tensor) -> Tensor:
        with in_half(0):
            first = F.linear(x[0], a)
        with in_half(1):
            second = F.linear(F.linear(x[1], a), a)
        return first + second

    assert_expected_inline(
        refusal(step, torch.randn(2, 5, WIDTH), torch.randn(WIDTH, WIDTH)),
        """the halves of the step must run the same stages, got [['linear']] and [['linear', 'linear']]""",  # noqa: E501
    )


def test_pools_used_in_another_order():
    """The first half uses late what the second uses early."""

    def step(x: Tensor, a: Tensor, b: Tensor, pool: Tensor, other: Tensor) -> Tensor:
        outputs = []
        for index, pools in enumerate([(pool, other), (other, pool)]):
            with in_half(index):
                y = conv(F.linear(x[index], a), pools[0], 1)
                outputs.append(conv(F.linear(y, b), pools[1], 1))
        return torch.cat(outputs)

    assert "the uses of a pool changed their order" in refusal(step, *arguments())


def test_a_pass_that_breaks_the_schedule_is_named():
    """A pass of one's own is held to the same rule: the graph must still lint."""

    def swap(graph: Graph) -> None:
        first, second = [n for n in graph.nodes if n.target is F.linear][:2]
        second.append(first)

    traced = trace(in_halves(two_layers), *arguments())
    with pytest.raises(RuntimeError, match=r"^pass swap broke the graph: "):
        apply_passes(traced.module, [Pass("interleave", interleave_halves), Pass("swap", swap)])
