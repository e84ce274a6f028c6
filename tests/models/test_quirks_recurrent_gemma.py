"""Peculiarities of RecurrentGemma: each test fails when one is "fixed"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from transformers import DynamicCache

import torch_hybrid as th
from tests.models.oracle import ask, assert_serves, chunked, decoded, make_texts, whole
from tests.models.refused import refusals
from tests.tiny_models import make_model

TINY = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256, "page_size": 16, "compile": False}


@torch.no_grad()
def test_chunks_go_on_where_the_last_one_ended():
    """Transformers' own second chunk of a prompt has forgotten the inputs of its convolutions."""
    hf_model = make_model("recurrent_gemma")
    oracle = ask(hf_model, make_texts([60]))
    tokens, positions = torch.tensor(oracle.texts), torch.arange(60)[None]
    options = {"use_cache": True, "past_key_values": DynamicCache(config=hf_model.config)}
    hf_model(tokens[:, :20], position_ids=positions[:, :20], **options)
    chunk = hf_model(tokens[:, 20:], position_ids=positions[:, 20:], **options)
    drift = (chunk.logits[0] - oracle.logits[0][20:]).abs().max()
    assert drift > 1e-2 * oracle.scale
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, chunked([60], 20))


@pytest.mark.parametrize("window", [1, 16, 100])
def test_a_window_counts_the_query_itself(window: int):
    hf_model = make_model("recurrent_gemma", attention_window_size=window)
    oracle = ask(hf_model, make_texts([90, 40]))
    model = th.adapt(hf_model)
    assert {entry.spec.window for entry in model.table.of_kind("paged_attention")} == {window}
    assert_serves(th.Runner(model, **TINY), oracle, whole([90, 40]), decoded([90, 40], 20))


@pytest.mark.parametrize(
    "options",
    [
        {"block_types": ["recurrent"]},
        {"block_types": ["attention"]},
        {"num_key_value_heads": 4, "attention_bias": False},
        {"lru_width": None, "conv1d_width": 3},
    ],
    ids=str,
)
def test_variants(options: dict[str, Any]):
    hf_model = make_model("recurrent_gemma", **options)
    oracle = ask(hf_model, make_texts([60, 3]))
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_serves(runner, oracle, chunked([60, 3], 25), decoded([60, 3], 2))


def test_logits_are_bounded():
    model = th.adapt(make_model("recurrent_gemma", logits_soft_cap=2.0))
    hidden = torch.randn(7, 64) * 10
    unbounded = model.hf_model.lm_head(hidden)
    logits = model.logits(hidden)
    assert unbounded.abs().max() > 10
    torch.testing.assert_close(logits, 2 * torch.tanh(unbounded / 2))


def test_embeddings_are_scaled_by_a_rounded_number():
    """The root of the width in bfloat16, whatever the model's dtype is."""
    options = {"hidden_size": 60, "num_attention_heads": 3}
    hf_model = make_model("recurrent_gemma", **options)
    assert float(hf_model.model.normalizer) == 7.75 != 60**0.5
    oracle = ask(hf_model, make_texts([30]))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, whole([30]))


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: list[dict[str, Any]] = [
    {"hidden_activation": "silu"},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"block_types": ["recurrent", "mlp"]},
    {"lru_width": 98},
    {"attention_window_size": 0},
]


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        refusals(tmp_path, "recurrent_gemma", REFUSED),
        """\
recurrent_gemma: config field hidden_activation must be one of ['gelu_pytorch_tanh'], got 'silu'
recurrent_gemma: config field rope_parameters.rope_type must be one of ['default'], got 'linear'
recurrent_gemma: config field block_types must be one of ['attention', 'recurrent'], got 'mlp'
recurrent_gemma: config field lru_width must be a multiple of the 4 heads, got 98
recurrent_gemma: config field sliding_window must be a number of keys where layer_types has sliding_attention, got 0""",  # noqa: E501
    )
