"""Peculiarities of Inkling: each test fails when one is "fixed"."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import torch_hybrid as th
from tests.models.oracle import ask, assert_serves, chunked, decoded, make_texts, serve
from tests.models.refused import refusals
from tests.tiny_models import make_model

TINY = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256, "page_size": 16, "compile": False}
LENGTHS = [70, 3]


def check(hf_model: Any, **options: Any) -> th.Runner:
    """Pieces of prompts and single tokens, against transformers."""
    model = th.adapt(copy.deepcopy(hf_model))
    texts = [[token % model.vocab_size for token in text] for text in make_texts(LENGTHS)]
    oracle = ask(hf_model, texts)
    runner = th.Runner(model, **TINY, **options)
    assert_serves(runner, oracle, chunked(LENGTHS, 25), decoded(LENGTHS, 2))
    return runner


@pytest.mark.parametrize(
    "options",
    [
        {"log_scaling_n_floor": None, "mlp_layer_types": ["dense"] * 4},
        {"rel_extent": 1, "sliding_window_size": 1, "conv_kernel_size": 2},
        {"rel_extent": 300, "layer_types": ["hybrid"] * 4, "n_shared_experts": 1},
        {"layer_types": ["hybrid_sliding"] * 4, "num_key_value_heads": 4},
    ],
    ids=str,
)
def test_variants(options: dict[str, Any]):
    check(make_model("inkling", **options))


def test_layers_with_a_window_have_biases_for_it_alone_and_nothing_grows_in_them():
    model = th.adapt(make_model("inkling"))
    specs = [entry.spec for entry in model.table.of_kind("paged_attention")]
    assert [(spec.window, spec.reach) for spec in specs] == [(37, 37), (0, 50)] * 2
    assert [layer.self_attn.mixer.log_floor for layer in model.layers] == [None, 20] * 2
    assert {spec.scale * spec.head_dim for spec in specs} == {1.0}


def test_rows_of_the_head_that_pad_it_have_no_logits():
    runner = check(make_model("inkling", seed=1, unpadded_vocab_size=190))
    assert runner.model.vocab_size == 190


def test_every_token_takes_the_shared_experts_by_weights_of_the_router():
    hf_model = make_model("inkling")
    theirs = hf_model.model.layers[1].mlp
    x = torch.randn(1, 9, 64)
    expected = theirs(x)
    ours = th.adapt(hf_model).layers[1].mlp
    assert ours.experts.down_proj.shape[0] == 5 + 2
    torch.testing.assert_close(ours(x), expected)


def test_every_token_has_the_bits_that_it_has_alone():
    runner = check(make_model("inkling"), batch_invariant=True)
    texts = make_texts(LENGTHS)
    bits = [serve(runner, texts, steps) for steps in (chunked(LENGTHS, 25), decoded(LENGTHS, 2))]
    for row in range(2):
        assert torch.equal(bits[0][row], bits[1][row])


def test_keys_and_values_of_8_bits():
    """As exact as they are: a few percent of the largest logit."""
    hf_model = make_model("inkling", mlp_layer_types=["dense"] * 4)
    oracle = ask(hf_model, make_texts(LENGTHS))
    runner = th.Runner(th.adapt(hf_model), **TINY, kv_dtype="fp8")
    served = serve(runner, oracle.texts, chunked(LENGTHS, 25))
    for ours, theirs in zip(served, oracle.logits, strict=True):
        assert 1e-4 * oracle.scale < (ours - theirs).abs().max() < 0.1 * oracle.scale


REFUSED = [
    {"hidden_act": "gelu"},
    {"shared_expert_sink": False},
    {"n_shared_experts": 0},
    {"conv_kernel_size": 17},
    {"layer_types": ["hybrid", "full_attention"] * 2},
]


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        refusals(tmp_path, "inkling", REFUSED),
        """\
inkling_text: config field hidden_act must be one of ['silu'], got 'gelu'
inkling_text: config field shared_expert_sink must be one of ['True'], got False
inkling_text: config field n_shared_experts must be positive, got 0
inkling_text: config field conv_kernel_size must be within 2 and 16, got 17
inkling_text: config field layer_types must be one of ['hybrid', 'hybrid_sliding'], got 'full_attention'""",  # noqa: E501
    )
