"""Peculiarities of ZAYA: each test fails when one is "fixed"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import torch_hybrid as th
from tests.models.oracle import ask, assert_serves, chunked, decoded, make_texts, serve
from tests.models.refused import refusals
from tests.tiny_models import make_model

TINY = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256, "page_size": 16, "compile": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {"cca_time0": 2, "layer_types": ["hybrid"] * 4},
    "no convolutions, and values of the token before": {"cca_time0": 1, "cca_time1": 1},
    "of heads alone": {"cca_time0": 1, "cca_time1": 4},
    "one head of keys, half of whose values are late": {"num_key_value_heads": 1},
    "as many heads of keys": {"num_key_value_heads": 4},
    "a bias of the head": {"lm_head_bias": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str):
    hf_model = make_model("zaya", **VARIANTS[name])
    oracle = ask(hf_model, make_texts([60, 3]))
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_serves(runner, oracle, chunked([60, 3], 25), decoded([60, 3], 2))


def test_values_of_the_second_half_of_the_heads_are_those_of_the_token_before():
    theirs = make_model("zaya").model.layers[0].self_attn.qkv_proj
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    values = theirs(x, None)[2][0]
    torch.testing.assert_close(values[:, 0], theirs.v_proj_current(x)[0])
    torch.testing.assert_close(values[1:, 1], theirs.v_proj_delayed(x)[0, :-1])
    assert not values[0, 1].any()


def skipping(hf_model: Any) -> Any:
    """The same with tokens that take no expert."""
    for layer in hf_model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = 0.02
    return hf_model


def test_some_tokens_skip_the_experts():
    """The router's last class is no expert: it adds nothing to the residual."""
    hf_model = skipping(make_model("zaya"))
    taken: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *args: taken.append(args[-1][1]))
        for layer in hf_model.model.layers
    ]
    oracle = ask(hf_model, make_texts([60]))
    for hook in hooks:
        hook.remove()
    share = (torch.cat(taken) == 0).float().mean()
    assert 0.05 < share < 0.5
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_serves(runner, oracle, chunked([60], 25), decoded([60], 20))


def test_the_bias_of_skipping_is_that_of_the_checkpoint(tmp_path: Path):
    """transformers puts -1 in its place as it loads."""
    skipping(make_model("zaya")).save_pretrained(tmp_path)
    theirs = type(make_model("zaya")).from_pretrained(tmp_path)
    ours = th.from_pretrained(tmp_path)
    biases = [m.layers[1].mlp.gate.balancing_biases for m in (theirs.base_model, ours)]
    assert [bias[-1].item() for bias in biases] == [-1.0, pytest.approx(0.02)]
    assert torch.equal(biases[0][:-1], biases[1][:-1])


def test_a_router_reads_that_of_the_layer_before():
    """Within a step: of a text in pieces, each token's own."""
    hf_model = make_model("zaya")
    before = ask(hf_model, make_texts([20]))
    for layer in hf_model.model.layers[1:]:
        layer.mlp.gate.router_states_scale.zero_()
    after = ask(hf_model, make_texts([20]))
    assert (before.logits[0] - after.logits[0]).abs().max() > 0.01 * before.scale


def test_residuals_are_float32():
    model = th.adapt(make_model("zaya").bfloat16())
    seen: list[torch.dtype] = []
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    serve(th.Runner(model, **TINY), make_texts([5]), chunked([5], 5))
    assert seen == [torch.float32]


def test_integers_leave_routers_as_they_are():
    """Linear layers of several in a row, which decide."""
    model = th.adapt(make_model("zaya"))
    th.quantize(model, "int8")
    gate, attention = model.layers[0].mlp.gate, model.layers[0].self_attn
    assert {weight.dtype for weight in gate.parameters()} == {torch.float32}
    assert attention.qkv_proj.mixer.in_proj.weight.dtype == torch.int8


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"attention_bias": True},
    {"cca_time0": 9, "cca_time1": 9},
    {"layer_types": ["hybrid", "full_attention"] * 2},
    {
        "rope_parameters": {
            "hybrid": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "hybrid_sliding": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
]


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        refusals(tmp_path, "zaya", REFUSED),
        """\
zaya: config field hidden_act must be one of ['silu'], got 'gelu'
zaya: config field attention_bias must be one of ['False'], got True
zaya: convolutions of queries and keys must see at most 16 tokens, got 17 of config fields cca_time0 9 and cca_time1 9
zaya: config field layer_types must be one of ['hybrid', 'hybrid_sliding'], got 'full_attention'
zaya: config field rope_parameters.hybrid.rope_type must be one of ['default', 'linear', 'llama3', 'yarn'], got 'dynamic'""",  # noqa: E501
    )
