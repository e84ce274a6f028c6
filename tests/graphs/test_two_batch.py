"""Where steps are cut, what each half is given, and that two halves are one step."""

from __future__ import annotations

import random
from functools import cache
from itertools import accumulate

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import torch_hybrid as th
from tests.tiny_models import BUILDERS, VOCAB_SIZE, make_model
from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.prefix import PrefixPolicy
from torch_hybrid.graphs.capturing.static_inputs import StaticInputs
from torch_hybrid.graphs.options.measure_overlap import Trial, policy_of
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.graphs.step import Inputs
from torch_hybrid.graphs.stepping.buckets import StepSizes
from torch_hybrid.graphs.stepping.planner import StepPlanner
from torch_hybrid.graphs.two_batch import (
    ALWAYS_CUT,
    NEVER_CUT,
    OverlapPolicy,
    overlap_policy,
    plan_split,
)
from torch_hybrid.models.adapt import adapt

SIZES = {"max_seqs": 6, "max_tokens": 160, "kv_tokens": 800, "compile": False}
lengths_of_steps = st.lists(st.integers(0, 150), max_size=6)


# ---- the planner -----------------------------------------------------------------------------


@given(lengths_of_steps, st.sampled_from([1, 32]))
def test_the_cut_is_near_the_middle_and_cuts_no_chunk(lengths: list[int], grid: int):
    total, cut = sum(lengths), plan_split(lengths, grid=grid)
    assert 0 <= cut <= total
    assert abs(2 * cut - total) <= grid
    starts = [0, *accumulate(lengths)]
    nearest = max(start for start in starts if start <= cut)
    assert (cut - nearest) % grid == 0


@given(st.integers(0, 50))
def test_decode_is_cut_at_half_of_its_sequences(num_seqs: int):
    assert plan_split([1] * num_seqs, grid=32) == num_seqs // 2


@pytest.mark.parametrize(
    ("lengths", "grid", "cut"),
    [
        ([], 32, 0),
        ([1], 32, 0),
        ([20], 32, 0),
        ([20], 1, 10),
        ([100], 32, 64),
        ([100], 1, 50),
        ([10, 100], 32, 42),
        ([63, 1], 32, 32),
        ([1, 63], 32, 33),
        ([50, 50], 32, 50),
    ],
)
def test_cuts(lengths: list[int], grid: int, cut: int):
    assert plan_split(lengths, grid=grid) == cut


def make_planner(overlap: OverlapPolicy, *, axes: int = 1, family: str = "qwen3") -> StepPlanner:
    """The planner of a runner of one family, with so many axes of positions."""
    return StepPlanner(
        make_runner(family).backends,
        sizes=StepSizes.fine(
            max_seqs=SIZES["max_seqs"],
            max_tokens=SIZES["max_tokens"],
            half_tokens=-(-(SIZES["max_tokens"] + 32) // 2),
            num_pages=50,
            page_size=16,
        ),
        num_position_axes=axes,
        overlap=overlap,
        chunk_grid=32,
    )


def make_runner(family: str, **options: object) -> Runner:
    return Runner(model_of(family), **{**SIZES, **options})


@cache
def model_of(family: str) -> th.HybridModel:
    """A tiny model of the family; its weights are the same at every call."""
    return adapt(make_model(family))


@given(st.lists(st.integers(1, 26), min_size=1, max_size=6), st.sampled_from(["last", "all"]))
def test_rows_find_every_token_in_the_padded_halves(lengths: list[int], logits: str):
    runner = make_runner("qwen3_5", two_batch_overlap="on")
    seqs = runner.new_sequences(len(lengths))
    tokens = [[100 * n + i for i in range(length)] for n, length in enumerate(lengths)]
    positions = torch.arange(3 * sum(lengths)).view(3, -1)
    batch = runner.cache.make_batch(
        seqs, tokens, positions=positions, num_position_axes=3, table_width=lambda n: max(n, 2)
    )
    planner = make_planner(ALWAYS_CUT, axes=3, family="qwen3_5")
    mode = Mode.DECODE if max(lengths) == 1 else Mode.EXTEND
    variant, inputs = planner.plan(batch, mode, logits)
    assert variant.in_halves
    wanted = batch.tokens
    if logits == "last":
        wanted = torch.tensor([new[-1] for new in tokens])
    joined = torch.cat([part.batch.tokens for part in inputs.parts])
    assert torch.equal(joined[inputs.rows][: len(wanted)], wanted)
    rows = planner.plan(batch, mode, "all")[1].rows[: sum(lengths)]
    in_order = torch.cat([part.batch.positions for part in inputs.parts], dim=1)[:, rows]
    assert torch.equal(in_order, positions)


def plan(runner: Runner, planner: StepPlanner, lengths: list[int], mode: Mode) -> Inputs:
    seqs = runner.new_sequences(len(lengths))
    batch = runner.cache.make_batch(seqs, [[1] * n for n in lengths], table_width=lambda n: 16)
    return planner.plan(batch, mode, "last")[1]


def test_halves_of_a_bucket_have_one_shape():
    """Whatever the lengths, one graph and a few sizes serve: both halves are padded alike."""
    runner, planner = make_runner("qwen3_next"), make_planner(ALWAYS_CUT, family="qwen3_next")
    for lengths in ([100], [33, 1, 1], [1, 1, 20], [2]):
        first, second = plan(runner, planner, lengths, Mode.EXTEND).parts
        shapes = [[leaf.shape for leaf in pytree.tree_leaves(part)] for part in (first, second)]
        assert shapes[0] == shapes[1]
        runner = make_runner("qwen3_next")


def test_halves_alias_nothing_of_each_other():
    """The second half of another engine took the first half's plan for its own."""
    runner, planner = make_runner("qwen3_next"), make_planner(ALWAYS_CUT, family="qwen3_next")
    planned = plan(runner, planner, [40, 3, 30], Mode.EXTEND)
    static = StaticInputs(planned, torch.device("cpu")).refresh(planned)
    first, second = (bytes_of(part) for part in static.parts)
    assert first.isdisjoint(second)


def bytes_of(value: object) -> set[int]:
    leaves: list[Tensor] = pytree.tree_leaves(value)
    return {at for leaf in leaves for at in range(leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes)}


def test_the_second_half_goes_on_where_the_first_ended():
    runner, planner = make_runner("qwen3_next"), make_planner(ALWAYS_CUT, family="qwen3_next")
    first, second = plan(runner, planner, [100, 1], Mode.EXTEND).parts
    assert first.batch.cu_seqlens.tolist() == [0, 64, 64]
    assert first.batch.seq_lens.tolist() == [64, 0]
    assert second.batch.cu_seqlens.tolist() == [0, 36, 37]
    assert second.batch.seq_lens.tolist() == [100, 1]
    slot = int(first.batch.state_indices[0])
    assert second.plans["gated_delta_rule"].initial_indices.tolist() == [slot, 0]
    assert first.plans["gated_delta_rule"].initial_indices.tolist() == [0, 0]


# ---- policies --------------------------------------------------------------------------------


def test_policies_by_name():
    mine = OverlapPolicy(min_decode_seqs=4)
    measured = OverlapPolicy(min_extend_tokens=512)
    named = {"off": NEVER_CUT, "on": ALWAYS_CUT, "auto": measured}
    for name, policy in named.items():
        assert overlap_policy(name, lambda: measured) == policy
    assert overlap_policy(mine, lambda: measured) == mine


def test_auto_measures_nothing_for_a_model_alone():
    runner = make_runner("qwen3", two_batch_overlap="auto")
    assert runner.overlap == runner.report().overlap == NEVER_CUT
    assert runner.report().overlap_trials == ()


def test_auto_cuts_from_the_size_that_paid():
    small = Trial(num_tokens=256, whole=1.0, halves=1.2)
    large = Trial(num_tokens=512, whole=2.0, halves=1.6)
    assert policy_of((small,)) == NEVER_CUT
    policy = policy_of((small, large))
    assert policy.cuts(Mode.EXTEND, 1, 512)
    assert not policy.cuts(Mode.EXTEND, 1, 511)
    assert not policy.cuts(Mode.DECODE, 4096, 4096)


def variants(planner: StepPlanner) -> list[str]:
    return [variant.name for variant in planner.forms]


def test_a_policy_makes_the_graphs_that_it_needs():
    assert variants(make_planner(NEVER_CUT)) == ["decode", "extend"]
    assert variants(make_planner(ALWAYS_CUT)) == ["decode, in halves", "extend, in halves"]
    some = OverlapPolicy(min_decode_seqs=4, min_extend_tokens=64)
    assert variants(make_planner(some)) == [
        "decode",
        "decode, in halves",
        "extend",
        "extend, in halves",
    ]
    out_of_reach = OverlapPolicy(min_decode_seqs=100, min_extend_tokens=64)
    assert variants(make_planner(out_of_reach)) == ["decode", "extend", "extend, in halves"]


def test_a_threshold_decides_step_by_step():
    runner = make_runner("qwen3", two_batch_overlap=OverlapPolicy(min_extend_tokens=64))
    ran: list[str] = []
    for variant, step in list(runner._steps.of.items()):
        runner._steps.of[variant] = lambda *args, v=variant, s=step: (ran.append(v.name), s(*args))[
            1
        ]
    [seq] = runner.new_sequences(1)
    for count in (63, 64, 1):
        runner.extend([seq], [[1] * count])
    assert ran == ["extend", "extend, in halves", "decode"]


def test_a_bucket_too_small_to_cut():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make_runner("qwen3", two_batch_overlap="on", max_seqs=1)
    assert_expected_inline(
        str(caught.value),
        """decode steps of at most 1 sequence(s) are too small to cut in halves: two_batch_overlap needs max_seqs of at least 2""",  # noqa: E501
    )


# ---- two halves are one step -----------------------------------------------------------------

STEPS = {
    "one sequence, one token": [[1], [1], [1]],
    "two tokens": [[2], [2]],
    "cut inside a sequence": [[100], [150], [3]],
    "cut inside the first of several": [[90, 5, 1], [1, 1, 1]],
    "cut inside the last of several": [[1, 5, 90], [1, 1, 1]],
    "cut between sequences": [[32, 32], [16, 16]],
    "all tokens in one of many": [[1, 1, 150, 1, 1, 1], [1] * 6],
    "odd decodes": [[5] * 6, [1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]],
    "several tokens each": [[9, 3, 4], [4, 4, 4], [3, 3, 3], [2, 1, 4]],
    "decodes and a prompt": [[30, 30, 30, 0], [1, 1, 1, 70], [1, 1, 1, 1]],
    "a large step, then a small one": [[26] * 6, [1, 0, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0]],
}


def run(runner: Runner, steps: list[list[int]]) -> list[Tensor]:
    """Logits of every token of every step; 0: the sequence is not in the step."""
    rng = random.Random(0)
    seqs = runner.new_sequences(len(steps[0]))
    outputs = []
    for step in steps:
        rows = [row for row, n in enumerate(step) if n]
        tokens = [[rng.randrange(VOCAB_SIZE) for _ in range(step[row])] for row in rows]
        outputs.append(runner.extend([seqs[row] for row in rows], tokens, logits="all"))
    runner.free(seqs)
    return outputs


# A recurrence beside GQA, one beside MLA, and two mixers side by side: the others are cut alike.
THOROUGH = ("qwen3_next", "kimi_linear", "falcon_h1")
FEW = ("cut inside a sequence", "decodes and a prompt")


@pytest.mark.parametrize("family", BUILDERS)
def test_overlap_is_no_overlap(family: str):
    one, two = make_runner(family), make_runner(family, two_batch_overlap="on")
    for name in STEPS if family in THOROUGH else FEW:
        for actual, expected in zip(run(two, STEPS[name]), run(one, STEPS[name]), strict=True):
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error < 2e-5, f"{family} differs by {error:.1e} in {name}"


PREFIXES = {
    "absorbed": PrefixPolicy(absorbed="always"),
    "one shot": PrefixPolicy(absorbed="never"),
    "one chunk and more": PrefixPolicy(absorbed="never", one_shot=False, token_budget=32),
    "one shot or chunks": PrefixPolicy(absorbed="never", token_budget=64),
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_halves_take_one_form_that_serves_both(prefix: str):
    """The second half has more of a prefix than the step: what the first half writes."""
    one = make_runner("deepseek_v3")
    backends = th.Backends(prefix=PREFIXES[prefix])
    two = make_runner("deepseek_v3", two_batch_overlap="on", backends=backends)
    for name, steps in STEPS.items():
        for actual, expected in zip(run(two, steps), run(one, steps), strict=True):
            assert (actual - expected).abs().max() < 2e-5 * expected.abs().max(), name


def test_a_step_that_is_cut_touches_no_other_slot_or_page():
    runner = make_runner("qwen3_next", two_batch_overlap="on")
    kept, used = runner.new_sequences(2)
    runner.extend([kept], [[1] * 20])
    states = [t for s in runner.cache.pools["gated_delta_rule"] for t in s.values()]
    before = [t.clone() for t in states]
    for lengths in ([100], [3], [1]):
        runner.extend([used], [[5] * n for n in lengths])
    slot = runner.cache.slot(used)
    others = [other for other in range(SIZES["max_seqs"] + 1) if other != slot]
    for old, new in zip(before, states, strict=True):
        assert torch.equal(old[others], new[others])
        assert not torch.equal(old[slot], new[slot])
    assert not any(t[0].any() for t in states)
    for full in runner.cache.pools["paged_attention"]:
        assert not full["kv"][:, 0].any()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_idle(overlap: str):
    """A rank without work runs a step all the same, and nothing changes."""
    runner = make_runner("qwen3_next", two_batch_overlap=overlap)
    [seq] = runner.new_sequences(1)
    runner.extend([seq], [[1, 2, 3]])
    before = [pool.clone() for pool in runner.cache.pool_tensors()]
    assert runner.extend([], []).shape == (0, VOCAB_SIZE)
    for pool, copy in zip(runner.cache.pool_tensors(), before, strict=True):
        assert torch.equal(pool, copy)
    assert runner.length(seq) == 3


def test_positions_of_three_axes_are_cut_by_token():
    """Cut by sequence, they gave another model's positions (and mostly a crash)."""
    positions = torch.stack([torch.arange(50) // (axis + 1) for axis in range(3)])
    outputs = []
    for overlap in ("off", "on"):
        runner = make_runner("qwen3_5", two_batch_overlap=overlap)
        seqs = runner.new_sequences(2)
        tokens = [[3] * 20, [4] * 30]
        outputs.append(runner.extend(seqs, tokens, logits="all", positions=positions))
    assert (outputs[0] - outputs[1]).abs().max() < 2e-5 * outputs[0].abs().max()


def test_an_engine_serves_with_overlap():
    """Draft models, samplers and schedulers see the same runner: the same tokens come out."""
    prompts = [[1, 2, 3], list(range(70)), [5]]
    outputs = []
    for overlap in ("off", "on"):
        engine = th.Engine(make_runner("qwen3_next", two_batch_overlap=overlap))
        done = engine.generate(prompts, th.Sampling(max_new_tokens=6, ignore_eos=True))
        outputs.append({out.index: out.tokens for out in done})
    assert outputs[0] == outputs[1]
