"""What a runner captures before it serves: every size that an engine's steps then have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import torch_hybrid as th
from tests.models.mtp_checkpoint import make_checkpoint
from tests.tiny_models import FEWEST_LAYERS, make_model
from torch_hybrid.models.adapt import adapt

# Page tables of three widths, extend steps of two numbers of sequences.
SIZES = {"max_seqs": 12, "max_tokens": 128, "kv_tokens": 1200, "page_size": 4, "compile": False}
CHUNKS = th.Backends(prefix=th.PrefixPolicy(token_budget=96, absorbed="never"))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent": ("qwen3_next_dense", {}),
    "chunks of a prefix": ("deepseek_v3", {"backends": CHUNKS}),
    "batch-invariant": ("falcon_h1", {"batch_invariant": True}),
    "adapters": ("qwen3", {"max_adapters": 2}),
    "drafts": ("qwen3", {"max_drafts": 2}),
    "drafts in one mode": ("qwen3_next_dense", {"max_drafts": 2, "batch_invariant": True}),
}


def serve(runner: th.Runner, **options: Any) -> None:
    rng = random.Random(0)
    lengths = [1, 2, 5, 30, 90, 127, 128, 129, 300, 500, 900] + [
        rng.randint(1, 60) for _ in range(20)
    ]
    prompts = [[rng.randrange(8, 60) for _ in range(length)] for length in lengths]
    with th.Engine(runner, eos_token_ids=[], **options) as engine:
        for temperature in (0.0, 0.7):
            sampling = th.Sampling(max_new_tokens=12, temperature=temperature)
            list(engine.generate(rng.sample(prompts, len(prompts)), sampling))


@pytest.mark.parametrize("case", CASES)
def test_serving_captures_no_more(case: str):
    family, options = CASES[case]
    runner = th.Runner(
        adapt(make_model(family, **FEWEST_LAYERS[family])), **SIZES, cuda_graphs="on", **options
    )
    runner.warm_up()
    captured = runner.report().captured_graphs
    assert len(captured) > 20
    drafts = th.Speculation(num_drafts=2, adapts=False) if "max_drafts" in options else None
    serve(runner, speculate=drafts)
    more = runner.report().captured_graphs[len(captured) :]
    assert more == ()


def test_serving_with_a_head_captures_no_more(tmp_path: Path):
    make_checkpoint("qwen3_next_dense", tmp_path)
    model = th.from_pretrained(tmp_path, mtp=True)
    runner = th.Runner(model, **SIZES, cuda_graphs="on", max_drafts=2)
    runner.warm_up()
    captured = runner.report().captured_graphs
    serve(runner, speculate=th.Speculation("mtp", num_drafts=2, adapts=False))
    more = runner.report().captured_graphs[len(captured) :]
    assert more == ()


def test_captures_may_be_left_to_the_steps():
    runner = th.Runner(
        adapt(make_model("qwen3", **FEWEST_LAYERS["qwen3"])), **SIZES, cuda_graphs="on"
    )
    runner.warm_up(capture=False)
    assert runner.report().captured_graphs == ()
