"""Layouts and head counts that break assumptions: each served in ragged chunks and decode."""

from __future__ import annotations

import pytest

import torch_hybrid as th
from tests.models.oracle import ask, assert_serves, decoded, make_texts, mixed
from tests.tiny_models import make_model

LENGTHS = (4, 70, 131)
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


def layers(*kinds: str) -> dict[str, object]:
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


ODD_HEADS = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}
CASES = {
    "odd head counts": ("qwen3_next_dense", ODD_HEADS),
    "odd head counts, plain projections": ("qwen3_5", ODD_HEADS),
    "one kv head": ("qwen3_next_dense", {"num_key_value_heads": 1}),
    "as many kv heads as query heads": ("qwen3_5", {"num_key_value_heads": 4}),
    "one key head": ("qwen3_5", {"linear_num_key_heads": 1, "linear_num_value_heads": 1}),
    "wide keys, narrow values": (
        "qwen3_next_dense",
        {"linear_key_head_dim": 48, "linear_value_head_dim": 16},
    ),
    "head_dim 80": ("qwen3", {"head_dim": 80}),
    "short convolution": ("qwen3_5", {"linear_conv_kernel_dim": 2}),
    "first layer full": ("qwen3_next_dense", layers(FULL, LINEAR, LINEAR)),
    "last layer linear": ("olmo_hybrid", layers(LINEAR, FULL, LINEAR)),
    "only one full layer": ("qwen3_5", layers(LINEAR, LINEAR, LINEAR, FULL, LINEAR)),
    "only one linear layer": ("qwen3_5", layers(FULL, LINEAR, FULL)),
    "no full layer": ("qwen3_next_dense", layers(LINEAR, LINEAR)),
    "one layer": ("qwen3_next_dense", layers(FULL)),
    "dense layers among experts": ("qwen3_next", {"mlp_only_layers": [1, 2]}),
    "positive eigenvalues only": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "no rotary embedding": ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}}),
    "tied embeddings": ("qwen3_5", {"tie_word_embeddings": True}),
    "biases in attention": ("qwen3_next_dense", {"attention_bias": True}),
    "sliding windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 40, **layers(SLIDING, FULL, SLIDING)},
    ),
    "yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "max_position_embeddings": 256,
        },
    ),
    "MLA with queries of full rank": ("kimi_linear", {"q_lora_rank": None}),
    "MLA in the first layer": ("kimi_linear", layers(FULL, LINEAR, LINEAR)),
    "MLA in no layer": ("bailing_hybrid", layers(LINEAR, LINEAR)),
    "no experts": ("kimi_linear", {"mlp_layer_types": ["dense"] * 4}),
    "short convolution of Kimi delta attention": ("kimi_linear", {"linear_conv_kernel_dim": 2}),
    "one head of Kimi delta attention": ("kimi_linear", {"linear_num_heads": 1}),
    "decay without a bound": ("bailing_hybrid", {"kda_safe_gate": False}),
    "lightning attention of six heads": ("minimax", {"num_attention_heads": 6}),
    "lightning attention in blocks of 32": ("minimax", {"block_size": 32}),
    "no lightning attention": ("minimax", layers(FULL, FULL)),
    "only lightning attention": ("minimax", layers(LINEAR, LINEAR)),
    "one expert": ("minimax", {"num_local_experts": 1, "num_experts_per_tok": 1}),
}
# Weights without a near tie of routers, and without a token whose logits magnify rounding so that
# transformers' own float32 error is near half of what is allowed.
SEEDS = {
    "as many kv heads as query heads": 0,
    "short convolution of Kimi delta attention": 0,
    "lightning attention of six heads": 0,
    "lightning attention in blocks of 32": 0,
    "no lightning attention": 0,
}


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path):
    family, options = CASES[name]
    hf_model = make_model(family, seed=SEEDS.get(name, 3), **options)
    oracle = ask(hf_model, make_texts(LENGTHS))
    hf_model.save_pretrained(tmp_path)
    model = th.from_pretrained(tmp_path)
    runner = th.Runner(model, max_seqs=3, max_tokens=256, kv_tokens=320, compile=False)
    assert_serves(runner, oracle, mixed(LENGTHS, seed=0), decoded(LENGTHS, 3))
