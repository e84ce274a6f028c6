"""Peculiarities of Inkling-2: each test fails when one is "fixed"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import torch_hybrid as th
from tests.models.oracle import ask, chunked, make_texts, serve
from tests.models.refused import refusals
from tests.models.test_quirks_inkling import LENGTHS, TINY, check
from tests.tiny_models import make_model
from torch_hybrid.layers.sink_attention import DynamicSinkAttention


@pytest.mark.parametrize(
    "options",
    [
        {"rel_extent": 1, "sliding_window_size": 1, "conv_kernel_size": 2},
        {"layer_types": ["hybrid"] * 4, "num_key_value_heads": 1, "n_layers_per_attn_res_block": 1},
        {"layer_types": ["hybrid_sliding"] * 4, "n_layers_per_attn_res_block": 9},
    ],
    ids=str,
)
def test_variants(options: dict[str, Any]):
    check(make_model("inkling2", **options))


def test_layers_without_a_window_change_their_taps_by_token_and_grow():
    model = th.adapt(make_model("inkling2"))
    specs = [entry.spec for entry in model.table.of_kind("paged_attention")]
    assert [(spec.window, spec.reach, spec.sinks) for spec in specs] == [
        (37, 37, True),
        (0, 50, True),
    ] * 2
    assert [spec.scale for spec in specs] == [spec.head_dim**-0.5 for spec in specs]
    mixers = [layer.self_attn.mixer for layer in model.layers]
    assert [isinstance(mixer, DynamicSinkAttention) for mixer in mixers] == [False, True] * 2
    assert [mixer.log_floor for mixer in mixers] == [None, 20] * 2


def test_a_block_is_read_from_the_layer_on_that_begins_the_next():
    """But for the first, whose stream is the embeddings: each layer but the first mixes twice."""
    model = th.adapt(make_model("inkling2", num_hidden_layers=5))
    residuals = [(layer.attention_input, layer.mlp_input) for layer in model.layers]
    known = [
        None if one is None else int(one.bias.isfinite().sum())
        for pair in residuals
        for one in pair
    ]
    assert known == [None, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert model.hf_model.model.final_input.residual.bias.tolist() == [0.0, 0.0]


def test_rows_of_the_head_that_pad_it_have_no_logits():
    runner = check(make_model("inkling2", seed=1, unpadded_vocab_size=190))
    assert runner.model.vocab_size == 190


def test_routers_stay_in_float32():
    model = th.adapt(make_model("inkling2").bfloat16())
    assert {layer.mlp.gate.weight.dtype for layer in model.layers} == {torch.float32}
    assert model.layers[0].post_attention_convolution.mixer.conv_weight.dtype == torch.bfloat16


@pytest.mark.parametrize("weights", ["int8", "fp8 keys"])
def test_fewer_bits(weights: str):
    """As exact as they are: a few percent of the largest logit."""
    hf_model = make_model("inkling2", n_routed_experts=3, num_experts_per_tok=3)
    oracle = ask(hf_model, make_texts(LENGTHS))
    model = th.adapt(hf_model)
    if weights == "int8":
        th.quantize(model, weights)
    runner = th.Runner(model, **TINY, kv_dtype="fp8" if weights == "fp8 keys" else "auto")
    served = serve(runner, oracle.texts, chunked(LENGTHS, 25))
    for ours, theirs in zip(served, oracle.logits, strict=True):
        assert 1e-4 * oracle.scale < (ours - theirs).abs().max() < 0.2 * oracle.scale


REFUSED = [
    {"hidden_act": "gelu"},
    {"n_shared_experts": 1},
    {"logits_mup_width_multiplier": 2.0},
    {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    {"conv_kernel_size": 17},
    {"mlp_up_softcap": 0.0},
    {"n_layers_per_attn_res_block": 0},
    {"layer_types": ["hybrid", "full_attention"] * 2},
]


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        refusals(tmp_path, "inkling2", REFUSED),
        """\
inkling2_text: config field hidden_act must be one of ['silu'], got 'gelu'
inkling2_text: config field n_shared_experts must be one of ['0'], got 1
inkling2_text: config field logits_mup_width_multiplier must be one of ['1.0'], got 2.0
inkling2_text: config field mlp_layer_types must be one of ['sparse'], got 'dense'
inkling2_text: config field conv_kernel_size must be within 2 and 16, got 17
inkling2_text: config field mlp_up_softcap must be positive, got 0.0
inkling2_text: config field n_layers_per_attn_res_block must be positive, got 0
inkling2_text: config field layer_types must be one of ['hybrid', 'hybrid_sliding'], got 'full_attention'""",  # noqa: E501
    )


def test_blocks_of_32_numbers_of_8_bits_are_refused(tmp_path: Path):
    """As which published experts are stored."""
    scales = {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    config = make_model("inkling2").config
    config.quantization_config = scales
    config.save_pretrained(tmp_path)
    with pytest.raises(th.UnsupportedError, match=r"weight_block_size must be \[128, 128\], got"):
        th.from_pretrained(tmp_path)
