"""Whole requests on real models: the tokens that they get without drafts."""

from __future__ import annotations

import random

import pytest

from tests.serving.speculation.drafters import Knowing
from tests.tiny_models import FEWEST_LAYERS, VOCAB_SIZE, make_model
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.models.adapt import adapt
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.speculation import Speculation

SIZES = {"max_seqs": 3, "max_tokens": 48, "kv_tokens": 192, "page_size": 8, "compile": False}


@pytest.mark.parametrize(
    "family", ["qwen3_next_dense", "bailing_hybrid", "falcon_h1", "minimax", "qwen3"]
)
def test_tokens_are_those_without(family: str):
    """Prompts in chunks beside drafts, requests that wait and are preempted, greedy and drawn."""
    model = adapt(make_model(family, **FEWEST_LAYERS[family]))
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (5, 60, 1, 17, 9)]
    samplings = [
        Sampling(max_new_tokens=20 + 2 * i, temperature=(i % 2) * 0.8, top_k=20, seed=i)
        for i in range(len(prompts))
    ]
    plain = {o.index: o for o in Engine(Runner(model, **SIZES)).generate(prompts, samplings)}
    drafter = Knowing(lambda request: plain[request.index].tokens, vocab_size=VOCAB_SIZE)
    runner = Runner(model, **SIZES, max_drafts=3)
    engine = Engine(runner, speculate=Speculation(drafter, num_drafts=3, adapts=False))
    outputs = {output.index: output for output in engine.generate(prompts, samplings)}
    assert outputs == plain
    assert engine.stats().drafts.accepted > 20
    assert (runner.free_slots, runner.free_pages) == (3, 24)
