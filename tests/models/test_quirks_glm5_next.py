"""Quirks of GLM-5.3: each test fails when one is "fixed"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.models.oracle import ask, assert_serves, decoded, make_texts, serve, whole
from tests.tiny_models import VOCAB_SIZE, make_model
from torch_hybrid.models.families import architecture_of

ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["indexed_attention"]}


def make_runner(model: Any) -> th.Runner:
    return th.Runner(model, max_seqs=1, max_tokens=64, kv_tokens=64, compile=False)


def heard(runner: th.Runner, length: int) -> list[bool]:
    """Whether the logits of the last token of a text depend on a token of each block of four."""
    [text] = make_texts([length])

    def last_logits(tokens: list[int]) -> Tensor:
        return serve(runner, [tokens], whole([length]))[0][-1]

    def changed(place: int) -> list[int]:
        return [(token + (i == place)) % VOCAB_SIZE for i, token in enumerate(text)]

    expected = last_logits(text)
    return [
        not torch.equal(last_logits(changed(place)), expected) for place in range(2, length - 1, 4)
    ]


def test_only_picked_blocks_are_seen():
    """A layer of attention alone hears nothing of other blocks; it hears all where it takes all."""
    runner = make_runner(th.adapt(make_model("glm5_next", **ONE_LAYER, index_topk=8, seed=1)))
    assert heard(runner, 11) == [True] * 2
    assert 2 <= sum(heard(runner, 35)) < 5  # of 8; a changed token may have its block picked


def test_a_token_that_completes_a_block_may_not_see_itself():
    """Then nothing but blocks is seen, and its own is one of them."""
    hf_model = make_model("glm5_next", **ONE_LAYER, index_topk=4, seed=1)
    texts = make_texts([36] * 6)
    oracle = ask(hf_model, texts)
    runner = make_runner(th.adapt(hf_model))
    [layer] = runner.model.layers
    seen = []
    picked = layer.self_attn.mixer._pick
    layer.self_attn.mixer._pick = lambda *args: seen.append(picked(*args)) or seen[-1]
    for text, logits in zip(oracle.texts, oracle.logits, strict=True):
        [served] = serve(runner, [text], whole([36]))
        assert (served - logits).abs().max() < 2e-5 * oracle.scale
    assert any(8 not in blocks[-1] for blocks in seen)


def test_a_decode_step_that_pools_and_picks_at_once_is_its_parts():
    """The same op, taken by name where its parts are the faster ones."""
    model = th.adapt(make_model("glm5_next", **ONE_LAYER, index_topk=8, seed=1))
    sizes = {"max_seqs": 1, "max_tokens": 64, "kv_tokens": 64, "compile": False}
    [text] = make_texts([39])
    parts, step = (
        serve(th.Runner(model, **sizes, backends=backends), [text], decoded([39], 30))[0]
        for backends in (
            th.Backends(ops={"gated_pooling": "torch", "select_blocks": "torch"}),
            th.Backends(ops={"pooled_selection_step": "torch"}),
        )
    )
    assert torch.equal(step, parts)


def test_streams_leave_as_a_plain_mean():
    """DeepSeek-V4, whose connections these are, weighs them."""
    hf_model = make_model("glm5_next")
    assert not list(hf_model.model.language_model.hc_head.parameters())


def test_gates_have_no_lower_bound():
    """Rows of up are clamped on both sides, gates from above."""
    hf_model = make_model("glm5_next", num_hidden_layers=2, swiglu_limit=0.2)
    experts = hf_model.model.language_model.layers[1].mlp.experts
    experts.gate_up_proj.mul_(8)
    oracle = ask(hf_model, make_texts([40]))
    assert_serves(make_runner(th.adapt(hf_model)), oracle, whole([40]))


def test_decay_without_a_bound():
    hf_model = make_model("glm5_next", num_hidden_layers=2, linear_lower_bound=None)
    oracle = ask(hf_model, make_texts([40]))
    assert_serves(make_runner(th.adapt(hf_model)), oracle, whole([40]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("indexer_types", ["full", "shared"] * 2),
        ("index_kpool_always_select_tail", False),
        ("hidden_act", "gelu"),
    ],
)
def test_config_field_that_is_not_served(field: str, value: object):
    config = make_model("glm5_next").config
    setattr(config.text_config, field, value)
    with pytest.raises(th.UnsupportedError, match=f"config field {field} must be one of"):
        architecture_of(config)


def test_blocks_lie_in_one_page():
    model = th.adapt(make_model("glm5_next"))
    with pytest.raises(th.UnsupportedError, match=r"page_size must be a multiple of 4.*got 6"):
        th.Runner(model, page_size=6, compile=False)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_weight_that_is_taken_apart_stays_a_float(weights: str):
    """A step of integers runs, with logits near those of the floats."""

    def logits(model: Any) -> Tensor:
        runner = th.Runner(model, max_seqs=1, max_tokens=64, kv_tokens=64, compile=False)
        return runner.extend(runner.new_sequences(1), [list(range(20))], logits="all")

    sizes = {"q_lora_rank": 32, "linear_head_dim": 32, "num_hidden_layers": 2}
    floats, model = (th.adapt(make_model("glm5_next", **sizes)) for _ in range(2))
    th.quantize(model, weights)
    expected = logits(floats)
    assert (logits(model) - expected).norm() < 0.5 * expected.norm()
