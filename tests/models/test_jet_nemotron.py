"""Jet-Nemotron, loaded from the published layout, against a slow reference in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.models.jet_reference import CONFIG, make_weights, reference_logits
from tests.models.oracle import (
    Oracle,
    assert_equal_logits,
    chunked,
    decoded,
    make_texts,
    mixed,
    serve,
    whole,
)
from tests.models.ring_checkpoint import save
from tests.tiny_models import make_model

LENGTHS = (33, 66, 80)
_BLOCK = CONFIG["efficient_attention_config"]["jet"]


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}])
def test_logits(fields: dict[str, Any], tmp_path: Path) -> None:
    config = {**CONFIG, **fields}
    weights = make_weights(config, seed=0)
    save(tmp_path, config, weights)
    texts = make_texts(LENGTHS)
    oracle = Oracle(texts, [reference_logits(config, weights, text).float() for text in texts])
    model = th.from_pretrained(tmp_path)
    assert model.eos_token_ids == (7,)
    runner = th.Runner(model, max_seqs=4, max_tokens=512, kv_tokens=512, compile=False)
    for steps in (whole(LENGTHS), chunked(LENGTHS, 17), decoded(LENGTHS, 32), mixed(LENGTHS, 0)):
        assert_equal_logits(serve(runner, texts, steps), oracle)


@pytest.mark.parametrize(
    "block",
    [{**_BLOCK, "use_bias": True}, {k: v for k, v in _BLOCK.items() if k != "norm_eps"}, None],
)
def test_blocks_that_are_not_served(block: dict[str, Any] | None, tmp_path: Path) -> None:
    save(tmp_path, {**CONFIG, "efficient_attention_config": block and {"jet": block}}, {})
    with pytest.raises(th.UnsupportedError, match="efficient_attention_config must have 'jet'"):
        th.from_pretrained(tmp_path)


def test_transformers_runs_whole_texts_alone() -> None:
    model = make_model("jet_nemotron")
    tokens = torch.tensor([[5, 6, 7]])
    with pytest.raises(th.UnsupportedError, match="whole texts of Jet-Nemotron alone"):
        model(tokens, attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(th.UnsupportedError, match="whole texts of Jet-Nemotron alone"):
        model.generate(tokens, max_new_tokens=2, use_cache=True)
