"""Draft models beside their target: tables of their own, with layer ids from 0."""

from __future__ import annotations

import pytest

import torch_hybrid as th
from tests.models.oracle import Oracle, ask, assert_serves, chunked, make_texts
from tests.tiny_models import make_model
from torch_hybrid.models.adapt import adapt

LENGTHS = (5, 40)
LINEAR, FULL = "linear_attention", "full_attention"
DRAFTS = {
    "one full layer": ("qwen3_next_dense", [FULL]),
    "one linear layer": ("qwen3_next_dense", [LINEAR]),
    "two layers": ("qwen3_next_dense", [FULL, LINEAR]),
    "one layer of latents": ("deepseek_v3", None),
}


def make(family: str, layer_types: list[str] | None, seed: int) -> tuple[th.Runner, Oracle]:
    options = {"num_hidden_layers": 1}
    if layer_types is not None:
        options = {"num_hidden_layers": len(layer_types), "layer_types": layer_types}
    hf_model = make_model(family, seed=seed, **options)
    oracle = ask(hf_model, make_texts(LENGTHS))
    model = adapt(hf_model)
    return th.Runner(model, max_seqs=4, max_tokens=64, kv_tokens=256, compile=False), oracle


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_beside_a_target_whose_first_layer_is_linear(draft: str):
    """Steps alternate, as in speculative decoding; neither sees the other's layers or slots."""
    target, expected = make("qwen3_next_dense", [LINEAR, LINEAR, FULL], seed=1)
    runner, of_draft = make(*DRAFTS[draft], seed=2)
    assert target.model.table[0].kind == "gated_delta_rule"
    assert [entry.index for entry in runner.model.table.entries] == [0] * len(runner.model.table)
    steps = list(chunked(LENGTHS, 7))
    seqs, draft_seqs = target.new_sequences(2), runner.new_sequences(2)
    done = [0, 0]
    for step in steps:
        for r, own in ((runner, draft_seqs), (target, seqs)):
            pieces = [expected.texts[row][done[row] : done[row] + n] for row, n in step.items()]
            r.extend([own[row] for row in step], pieces)
        done = [n + step.get(row, 0) for row, n in enumerate(done)]
    for r, own, oracle in ((runner, draft_seqs, of_draft), (target, seqs, expected)):
        r.free(own)
        assert_serves(r, oracle, steps)


def test_a_draft_may_share_nothing_but_the_tokens():
    """A sequence of one runner is no sequence of the other, whatever its slot."""
    target, _ = make("qwen3_next_dense", [LINEAR, FULL], seed=1)
    runner, _ = make("qwen3_next_dense", [FULL], seed=2)
    [seq] = target.new_sequences(1)
    [own] = runner.new_sequences(1)
    assert target.cache.slot(seq) == runner.cache.slot(own)
    with pytest.raises(ValueError, match="belongs to another runner"):
        runner.extend([seq], [[1]])
