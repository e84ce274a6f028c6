"""A step of as many tokens for each sequence is a mode like the two that a runner has."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE, make_hybrid, make_model
from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.step import chunk_grid, make_backends
from torch_hybrid.caches.sequence import Sequence
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.graphs.step import Variant, make_step
from torch_hybrid.graphs.stepping.buckets import StepSizes
from torch_hybrid.graphs.stepping.planner import StepPlanner
from torch_hybrid.graphs.two_batch import ALWAYS_CUT, NEVER_CUT
from torch_hybrid.models.adapt import adapt

VERIFY = Mode(name="verify", tokens_per_seq=3)
SIZES = {"max_seqs": 6, "max_tokens": 64, "kv_tokens": 512}


def planner_of(runner: Runner, *, in_halves: bool) -> StepPlanner:
    model, cache = runner.model, runner.cache
    backends = make_backends(model.table, cache.sizes, None, [VERIFY])
    grid = chunk_grid(backends)
    sizes = {"max_seqs": 6, "max_tokens": 64, "half_tokens": 48, "num_pages": cache.num_pages}
    sizes["page_size"] = runner.page_size
    return StepPlanner(
        backends,
        sizes=StepSizes.fine(**sizes),
        num_position_axes=model.num_position_axes,
        overlap=ALWAYS_CUT if in_halves else NEVER_CUT,
        chunk_grid=grid,
        modes=[VERIFY],
    )


def prefixes(runner: Runner) -> list[Sequence]:
    seqs = runner.new_sequences(3)
    runner.extend(seqs, [[1, 2, 3, 4], [5], [6] * 20])
    return seqs


@pytest.mark.parametrize("in_halves", [False, True], ids=["whole", "in halves"])
@pytest.mark.parametrize("family", ["qwen3_next_dense", "kimi_linear", "falcon_h1"])
def test_a_step_of_three_tokens_for_each_sequence(family: str, in_halves: bool):
    model = adapt(make_model(family))
    rng = random.Random(0)
    drafts = [[rng.randrange(VOCAB_SIZE) for _ in range(3)] for _ in range(3)]
    extended = Runner(model, **SIZES, compile=False)
    expected = extended.extend(prefixes(extended), drafts, logits="all")

    runner = Runner(model, **SIZES, compile=False)
    seqs, planner = prefixes(runner), planner_of(runner, in_halves=in_halves)
    batch = runner.cache.make_batch(seqs, drafts, table_width=planner.table_width)
    variant, inputs = planner.plan(batch, VERIFY, "all")
    assert variant.name == ("verify, in halves" if in_halves else "verify")
    with torch.inference_mode():
        actual = make_step(model)(inputs, runner.cache.pools)
    assert relative_error(actual[: len(expected)], expected) < 2e-5


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def test_its_sizes():
    runner = Runner(make_hybrid(), **SIZES, compile=False)
    planner = planner_of(runner, in_halves=False)
    [variant] = planner.forms
    assert variant == Variant.of(VERIFY, planner.forms[variant], in_halves=False)
    for inputs, num_seqs in ((planner.largest(variant), 6), (planner.traced(variant), 8)):
        [part] = inputs.parts
        assert (part.batch.num_seqs, part.batch.num_tokens) == (num_seqs, 3 * num_seqs)
        assert inputs.rows is None
