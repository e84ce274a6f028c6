"""Peculiarities of RWKV-4: each test fails when one is "fixed"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.models.oracle import (
    Oracle,
    Step,
    ask,
    assert_equal_logits,
    chunked,
    decoded,
    make_texts,
    serve,
    whole,
)
from tests.tiny_models import as_made, make_model

TINY = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256, "page_size": 16, "compile": False}
LENGTHS = [60, 3]


def drift(oracle: Oracle, other: Oracle) -> float:
    """The largest difference of two oracles of one text, of the largest logit."""
    return (oracle.logits[0] - other.logits[0]).abs().max().item() / oracle.scale


def assert_serves(hf_model: Any, oracle: Oracle) -> th.HybridModel:
    runner = th.Runner(th.adapt(hf_model), **TINY)
    steps: list[list[Step]] = [whole(LENGTHS), [*chunked(LENGTHS, 25)], [*decoded(LENGTHS, 2)]]
    for each in steps:
        assert_equal_logits(serve(runner, oracle.texts, each), oracle)
    return runner.model


def test_halved_residuals_are_what_norms_with_an_eps_see():
    """It is halved every so many layers, and norms add their eps to what is left of it: a model
    that halves none has other logits."""
    hf_model, never = (
        make_model("rwkv", rescale_every=every, layer_norm_epsilon=0.1) for every in (1, 0)
    )
    oracle = ask(hf_model, make_texts(LENGTHS))
    assert drift(oracle, ask(never, oracle.texts)) > 1e-2
    assert_serves(hf_model, oracle)


@torch.no_grad()
def test_weights_are_divided_once():
    """By transformers' first forward, or by us."""
    texts = make_texts(LENGTHS)
    for was_run in (False, True):
        hf_model = make_model("rwkv")
        oracle = ask(hf_model, texts)
        if was_run:
            hf_model(torch.tensor(texts[:1]))
        assert hf_model.rwkv.layers_are_rescaled == was_run
        given = hf_model.rwkv.blocks[2].attention.output.weight.clone()
        ours = assert_serves(hf_model, oracle).layers[2].attention.mixer.out_proj.weight
        assert torch.equal(ours, given * (1.0 if was_run else 0.5))


def test_a_forward_of_transformers_divides_what_it_would_save():
    """Why ``ask`` leaves a model as it was made."""
    hf_model = make_model("rwkv")
    weight = hf_model.rwkv.blocks[2].feed_forward.value.weight
    given = weight.clone()
    hf_model(torch.tensor(make_texts([3])))
    assert torch.equal(weight, given / 2)
    as_made(hf_model)
    assert torch.equal(weight, given)


@torch.no_grad()
def test_sequences_of_a_batch_are_their_own():
    """In steps of one token, transformers adds the last input of each to that of all others."""
    hf_model, ids = make_model("rwkv"), torch.tensor(make_texts([9, 9]))
    oracle = ask(hf_model, ids.tolist())
    state = hf_model(ids[:, :8], use_cache=True).state
    last = hf_model(ids[:, 8:], state=state, use_cache=True).logits[:, -1]
    as_made(hf_model)
    expected = torch.stack([logits[-1] for logits in oracle.logits])
    assert (last - expected).abs().max() > 0.1 * oracle.scale
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_equal_logits(serve(runner, oracle.texts, decoded([9, 9], 1)), oracle)


def test_layers_that_halve_are_of_the_kind_of_others():
    """What differs is a tensor: they are compiled once."""
    model = th.adapt(make_model("rwkv"))
    assert [layer.scale.item() for layer in model.layers] == [1.0, 0.5, 1.0]
    assert "pre_ln" not in dict(model.layers[0].named_children())


def test_texts_may_be_longer_than_the_context():
    """It says how long a forward of a kernel may be: states know no position."""
    hf_model = make_model("rwkv", context_length=8)
    assert_serves(hf_model, ask(hf_model, make_texts(LENGTHS)))


def test_no_exponential_overflows():
    """Keys of hundreds, which float32 has no exponentials of."""
    hf_model = make_model("rwkv")
    for block in hf_model.rwkv.blocks:
        block.attention.key.weight.mul_(100.0)
    oracle = ask(hf_model, make_texts(LENGTHS))
    largest: list[float] = []

    def note(_module: object, _inputs: object, keys: Tensor) -> None:
        largest.append(keys.abs().max().item())

    model = th.adapt(hf_model)
    for layer in model.layers:
        layer.attention.mixer.key.register_forward_hook(note)
    assert all(logits.isfinite().all() for logits in oracle.logits)
    served = serve(th.Runner(model, **TINY), oracle.texts, whole(LENGTHS))
    assert max(largest) > 200
    for ours, theirs in zip(served, oracle.logits, strict=True):
        assert (ours - theirs).abs().max() < 1e-3 * oracle.scale  # e^x magnifies what x is off


@pytest.mark.parametrize(
    "options",
    [
        {"attention_hidden_size": 80},
        {"attention_hidden_size": None, "intermediate_size": None},
        {"layer_norm_epsilon": 0.1},
        {"rescale_every": 1},
        {"rescale_every": 0},
        {"rescale_every": -1},
        {"rescale_every": 3},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_variants(options: dict[str, Any]):
    hf_model = make_model("rwkv", **options)
    assert_serves(hf_model, ask(hf_model, make_texts(LENGTHS)))


def test_adapted_once():
    hf_model = make_model("rwkv")
    th.adapt(hf_model)
    with pytest.raises(ValueError, match="adapted before"):
        th.adapt(hf_model)
