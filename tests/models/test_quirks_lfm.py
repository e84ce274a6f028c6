"""Peculiarities of LFM2 and LFM3: each test fails when one is "fixed"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import torch_hybrid as th
from tests.models.oracle import ask, assert_serves, chunked, decoded, make_texts, whole
from tests.models.refused import refusals
from tests.tiny_models import make_model
from torch_hybrid.models.families import architecture_of

TINY = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256, "page_size": 16, "compile": False}
CONVOLUTIONS = {"layer_types": ["conv", "conv"], "num_hidden_layers": 2}


def windows_of(hf_model: Any) -> list[int]:
    table = architecture_of(hf_model.config).table
    return [entry.spec.window for entry in table.of_kind("paged_attention")]


@pytest.mark.parametrize("window", [1, 16, 33])
def test_a_window_counts_the_query_itself(window: int):
    """Of every length against a page, and longer than a prompt's chunks or shorter."""
    hf_model = make_model("lfm3", sliding_window=window)
    assert windows_of(hf_model) == [window, 0]
    oracle = ask(hf_model, make_texts([90, 40]))
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_serves(runner, oracle, whole([90, 40]), chunked([90, 40], 17), decoded([90, 40], 20))


@pytest.mark.parametrize("options", [{"use_sandwich_norm": False}, {"use_attention_gate": False}])
def test_lfm3_without_what_is_new_in_it(options: dict[str, bool]):
    hf_model = make_model("lfm3", **options)
    oracle = ask(hf_model, make_texts([60]))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, decoded([60], 3))


@pytest.mark.parametrize("family", ["lfm2", "lfm3"])
def test_no_attention_at_all(family: str):
    hf_model = make_model(family, **CONVOLUTIONS)
    oracle = ask(hf_model, make_texts([60, 3]))
    model = th.adapt(hf_model)
    assert model.table.kinds == ("short_convolution",)
    runner = th.Runner(model, **TINY)
    assert_serves(runner, oracle, whole([60, 3]), chunked([60, 3], 2), decoded([60, 3], 2))


def test_bias_of_experts_is_for_the_choice_alone():
    hf_model = make_model("lfm2_moe", num_experts_per_tok=6)  # all of them: no choice
    oracle = ask(hf_model, make_texts([60]))
    for layer in hf_model.model.layers[1:]:
        layer.feed_forward.expert_bias.add_(torch.randn(6))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, whole([60]))


@pytest.mark.parametrize("options", [{"use_expert_bias": False}, {"norm_topk_prob": False}])
def test_routers_with_less(options: dict[str, bool]):
    hf_model = make_model("lfm2_moe", **options)
    oracle = ask(hf_model, make_texts([60]))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, chunked([60], 25))


# ---- refusals ----------------------------------------------------------------------------------

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "lfm2": [{"conv_L_cache": 17}, {"rope_parameters": DYNAMIC}],
    "lfm2_moe": [{"layer_types": ["conv", "linear_attention", "conv", "full_attention"]}],
    "lfm3": [
        {"sliding_window": None},
        {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DEFAULT}},
    ],
}


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        "\n".join(refusals(tmp_path, family, REFUSED[family]) for family in REFUSED),
        """\
lfm2: config field conv_L_cache must be within 2 and 16, got 17
lfm2: config field rope_parameters.rope_type must be one of ['default', 'linear', 'llama3', 'yarn'], got 'dynamic'
lfm2_moe: config field layer_types must be one of ['conv', 'full_attention'], got 'linear_attention'
lfm3: config field sliding_window must be a number of keys where layer_types has sliding_attention, got None
lfm3: config field rope_parameters.full_attention.rope_type must be one of ['default', 'linear', 'llama3', 'proportional', 'yarn'], got 'dynamic'""",  # noqa: E501
    )
