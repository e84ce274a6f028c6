"""Whole models compiled, with experts and without, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.models.oracle import (
    ask,
    assert_equal_logits,
    chunked,
    decoded,
    make_texts,
    mixed,
    serve,
    whole,
)
from tests.tiny_models import make_model

pytestmark = pytest.mark.slow
LENGTHS = (5, 64, 131)
# Layers of every kind that a family has, and no more of them.
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": _TWO_LAYERS,
    "olmo_hybrid": _TWO_LAYERS,
    "kimi_linear": _TWO_LAYERS,
    "bailing_hybrid": _TWO_LAYERS,
    "minimax": _TWO_LAYERS,
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": _TWO_LAYERS,
    "falcon_h1_norm": {"num_hidden_layers": 2},
    "nemotron_h": {"layer_types": ["moe", "linear_attention", "mlp", "full_attention"]},
}
SEEDS = {"granitemoehybrid": 0}  # without a near tie of routers; 2 for the others


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, tmp_path):
    hf_model = make_model(family, seed=SEEDS.get(family, 2), **FAMILIES[family])
    oracle = ask(hf_model, make_texts(LENGTHS))
    hf_model.save_pretrained(tmp_path)
    model = th.from_pretrained(tmp_path)
    runner = th.Runner(model, max_seqs=3, max_tokens=256, kv_tokens=320)
    for steps in (
        whole(LENGTHS),
        chunked(LENGTHS, 50),
        decoded(LENGTHS, 4),
        mixed(LENGTHS, seed=0),
    ):
        assert_equal_logits(serve(runner, oracle.texts, steps), oracle)
    if model.num_position_axes == 3:
        generator = torch.Generator().manual_seed(0)
        positions = [torch.randint(0, 4, (3, n), generator=generator).cumsum(1) for n in LENGTHS]
        oracle = ask(hf_model, oracle.texts, positions)
        served = serve(runner, oracle.texts, decoded(LENGTHS, 4), positions)
        assert_equal_logits(served, oracle)
    report = runner.report()
    assert (report.recompiles, report.graph_breaks, report.pool_clones) == (0, 0, ())
