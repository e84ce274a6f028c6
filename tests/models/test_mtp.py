"""Heads that predict further tokens, as checkpoints have them: what is read, and what is refused.

That they draft what a head in plain PyTorch does is in ``tests/serving/speculation/test_head.py``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_hybrid as th
from tests.models.checkpoint.bytes_read import count_bytes_read
from tests.models.mtp_checkpoint import make_checkpoint
from tests.tiny_models import make_model
from torch_hybrid.explain import sections as explain

DENSE = "qwen3_next_dense"
SIZES: dict[str, Any] = {"max_seqs": 2, "max_tokens": 64, "kv_tokens": 128, "compile": False}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def test_the_model_itself_is_the_same(tmp_path: Path):
    """With its head or without: logits, config and layers; the head's have ids of their own."""
    make_checkpoint(DENSE, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, plain = th.from_pretrained(tmp_path, mtp=True), th.from_pretrained(tmp_path)
    logits = [
        runner.extend(runner.new_sequences(1), [[5, 17, 3, 9]], logits="all")
        for runner in (th.Runner(model, **SIZES), th.Runner(plain, **SIZES))
    ]
    assert torch.equal(*logits)
    configs = [x.hf_model.config.to_dict() for x in (model, plain)]
    assert configs[0] == configs[1]
    kinds = [[entry.kind for entry in layer] for layer in model.table.layers]
    assert kinds == [
        ["gated_delta_rule"],
        ["paged_attention"],
        ["previous_hidden", "paged_attention"],
    ]
    assert [entry.index for entry in model.table.of_kind("paged_attention")] == [0, 1]
    assert len(plain.table.layers) == len(plain.layers) == len(model.layers) == 2


def test_explain_counts_the_head(tmp_path: Path):
    make_checkpoint(DENSE, tmp_path)
    sections = explain.explain(
        th.Runner(th.from_pretrained(tmp_path, mtp=True), **SIZES, max_drafts=2)
    )
    text = "\n".join(str(row) for section in sections for row in section.rows)
    assert "previous_hidden" in text
    assert "previous_rows" in text


def test_a_checkpoint_without_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Named before a byte of a weight is read."""
    make_model(DENSE, num_hidden_layers=2).save_pretrained(tmp_path)
    with count_bytes_read(monkeypatch) as read, pytest.raises(ValueError) as error:  # noqa: PT011
        th.from_pretrained(tmp_path, mtp=True)
    assert f"{tmp_path} has no MTP head: there is no tensor mtp.fc.weight" in str(error.value)
    assert not read.total


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mtp.norm.weight", "missing keys: ['mtp.norm.weight']"),
        ("mtp.layers.0.self_attn.k_proj.weight", "missing keys"),
    ],
)
def test_a_head_that_lacks_a_weight(name: str, told: str, tmp_path: Path):
    make_checkpoint(DENSE, tmp_path)
    edit(tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match="the checkpoint") as error:
        th.from_pretrained(tmp_path, mtp=True)
    assert told in str(error.value)
    th.from_pretrained(tmp_path)  # whose model is whole


def test_model_types_whose_head_is_not_known(tmp_path: Path):
    make_model("qwen3", num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(
        th.UnsupportedError, match="model type 'qwen3' has no MTP head that is known"
    ):
        th.from_pretrained(tmp_path, mtp=True)


def test_layers_of_a_head_that_cannot_be_run(tmp_path: Path):
    make_checkpoint("nemotron_h", tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text()) | {"mtp_layers_block_type": ["linear_attention", "moe"]}
    path.write_text(json.dumps(fields))
    with pytest.raises(th.UnsupportedError, match=r"mtp_layers_block_type\[0\] must be one of"):
        th.from_pretrained(tmp_path, mtp=True)


def test_integers_and_another_dtype(tmp_path: Path):
    """The head is made of what the model is made of."""
    make_checkpoint(DENSE, tmp_path)
    for options in ({"weights": "int8"}, {"dtype": torch.bfloat16}):
        model = th.from_pretrained(tmp_path, mtp=True, **options)
        runner = th.Runner(model, **SIZES, max_drafts=2)
        seqs = runner.new_sequences(1)
        runner.extend(seqs, [[5, 17, 3]])
        assert len(runner.draft(seqs, [9], [2])[0]) == 2
