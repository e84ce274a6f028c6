"""Models that transformers has no class for, loaded from their published layouts, against slow
references in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.models import jet_reference, kimi_k3_reference
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
_BLOCK = jet_reference.CONFIG["efficient_attention_config"]["jet"]


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}])
def test_jet_nemotron(fields: dict[str, Any], tmp_path: Path) -> None:
    config = {**jet_reference.CONFIG, **fields}
    weights = jet_reference.make_weights(config, seed=0)
    save(tmp_path, config, weights)
    assert_serves_reference(tmp_path, partial(jet_reference.reference_logits, config, weights))


def test_kimi_k3(tmp_path: Path) -> None:
    """Its text part alone, by the names of the whole checkpoint."""
    text = kimi_k3_reference.TEXT
    weights = kimi_k3_reference.make_weights(text, seed=6)
    tower = {"vision_tower.patch_embed.proj.weight": torch.ones(4, 4)}
    save(tmp_path, kimi_k3_reference.CONFIG, {**weights, **tower})
    assert_serves_reference(tmp_path, partial(kimi_k3_reference.reference_logits, text, weights))


def assert_serves_reference(folder: Path, reference: Callable[[list[int]], Tensor]) -> None:
    texts = make_texts(LENGTHS)
    oracle = Oracle(texts, [reference(text).float() for text in texts])
    model = th.from_pretrained(folder)
    assert model.eos_token_ids == (7,)
    runner = th.Runner(model, max_seqs=4, max_tokens=512, kv_tokens=512, compile=False)
    for steps in (whole(LENGTHS), chunked(LENGTHS, 17), decoded(LENGTHS, 32), mixed(LENGTHS, 0)):
        assert_equal_logits(serve(runner, texts, steps), oracle)


@pytest.mark.parametrize(
    "block",
    [{**_BLOCK, "use_bias": True}, {k: v for k, v in _BLOCK.items() if k != "norm_eps"}, None],
)
def test_jet_blocks_that_are_not_served(block: dict[str, Any] | None, tmp_path: Path) -> None:
    save(
        tmp_path,
        {**jet_reference.CONFIG, "efficient_attention_config": block and {"jet": block}},
        {},
    )
    with pytest.raises(th.UnsupportedError, match="efficient_attention_config must have 'jet'"):
        th.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mla_use_output_gate": False}, "mla_use_output_gate must be"),
        ({"latent_moe_use_norm": False}, "latent_moe_use_norm must be"),
        ({"activation_situ_linear_beta": None}, "activation_situ_linear_beta must be"),
    ],
)
def test_kimi_k3_fields_that_are_not_served(
    fields: dict[str, Any], told: str, tmp_path: Path
) -> None:
    text = {**kimi_k3_reference.TEXT, **fields}
    save(tmp_path, {**kimi_k3_reference.CONFIG, "text_config": text}, {})
    with pytest.raises(th.UnsupportedError, match=told):
        th.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["jet_nemotron", "kimi_k3"])
def test_transformers_runs_whole_texts_alone(family: str) -> None:
    model = make_model(family)
    tokens = torch.tensor([[5, 6, 7]])
    with pytest.raises(th.UnsupportedError, match="whole texts of this model alone"):
        model(tokens, attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(th.UnsupportedError, match="whole texts of this model alone"):
        model.generate(tokens, max_new_tokens=2, use_cache=True)
