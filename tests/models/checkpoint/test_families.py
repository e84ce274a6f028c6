"""Every family, streamed from a checkpoint: the bits of transformers' loader, whole or cut."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    core_model_loading,
)

import torch_hybrid as th
from tests.models.checkpoint.bytes_read import count_bytes_read
from tests.tiny_models import BUILDERS, make_model
from torch_hybrid.models.checkpoint.read import read_weights
from torch_hybrid.models.load import transformers_class, unread
from torch_hybrid.models.shard import Experts, cut
from torch_hybrid.ranks import Ranks

CPU = torch.device("cpu")
OPTIONS = {"kimi_linear": {"linear_num_heads": 4}}  # heads that two ranks can share
MIXTURES = ["qwen3_next", "granitemoehybrid", "nemotron_h"]


def cut_and_read(folder: Path, rank: int, experts: Experts = "tensor", **options: Any) -> Any:
    checkpoint, model = unread(str(folder), device=CPU, **{"dtype": "auto", **options})
    cut(model, Ranks(rank=rank, size=2, group_name="two"), experts)
    read_weights(model, checkpoint, CPU)
    return model


def theirs_cut(folder: Path, rank: int, experts: Experts = "tensor", **options: Any) -> Any:
    model = th.adapt(load_with_transformers(folder, **options))
    cut(model, Ranks(rank=rank, size=2, group_name="two"), experts)
    return model


def load_with_transformers(folder: Path, dtype: Any = "auto") -> Any:
    ours = transformers_class(str(folder))
    if ours.__module__.startswith("torch_hybrid."):  # Ring-2.5 has Ling-3's model type
        return ours.from_pretrained(folder, dtype=dtype)
    config = AutoConfig.from_pretrained(folder)
    # GLM-5.3 is there as a multimodal model alone.
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=dtype)


def tensors_of(model: Any) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same_bits(ours: Any, theirs: Any) -> None:
    expected, given = tensors_of(theirs), tensors_of(ours)
    assert given.keys() == expected.keys()
    for name, weight in given.items():
        assert type(weight) is type(expected[name]), name
        assert weight.dtype == expected[name].dtype, name
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", BUILDERS)
def test_as_transformers_loads_it(family: str, stored: torch.dtype, tmp_path: Path):
    make_model(family, **OPTIONS.get(family, {})).to(stored).save_pretrained(tmp_path)
    assert_same_bits(th.from_pretrained(tmp_path), th.adapt(load_with_transformers(tmp_path)))
    for rank in range(2):
        assert_same_bits(cut_and_read(tmp_path, rank), theirs_cut(tmp_path, rank))


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1_norm", "kimi_linear"])
def test_cast_on_the_way(family: str, tmp_path: Path):
    make_model(family).save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        ours = th.from_pretrained(tmp_path, dtype=dtype)
        assert_same_bits(ours, th.adapt(load_with_transformers(tmp_path, dtype)))


@pytest.mark.parametrize("family", MIXTURES)
def test_whole_experts(family: str, tmp_path: Path):
    make_model(family).save_pretrained(tmp_path)
    for rank in range(2):
        ours = cut_and_read(tmp_path, rank, "all_to_all")
        assert_same_bits(ours, theirs_cut(tmp_path, rank, "all_to_all"))


def test_experts_by_their_numbers(tmp_path: Path):
    """The tenth follows the ninth, and names are looked up once for all experts."""
    make_model("qwen3_next", num_experts=12).save_pretrained(tmp_path)
    assert_same_bits(th.from_pretrained(tmp_path), th.adapt(load_with_transformers(tmp_path)))
    num_kinds = len({name for name in names_of(tmp_path) if ".experts.0." in name})
    with mock.patch.object(core_model_loading, "deepcopy", wraps=deepcopy) as copied:
        th.from_pretrained(tmp_path)
    assert copied.call_count <= num_kinds


def names_of(folder: Path) -> list[str]:
    return list(load_file(folder / "model.safetensors"))


def test_several_files(tmp_path: Path):
    make_model("qwen3_next").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same_bits(th.from_pretrained(tmp_path), th.adapt(load_with_transformers(tmp_path)))


def test_a_rank_reads_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows are read alone; of columns in short rows, whole rows pass by."""
    hidden = {"hidden_size": 256, "moe_intermediate_size": 256, "vocab_size": 8}
    make_model("qwen3_next", **hidden).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    monkeypatch.setattr("torch_hybrid.models.checkpoint.pieces.LONG_RUN_BYTES", 256)
    with count_bytes_read(monkeypatch) as whole:
        th.from_pretrained(tmp_path)
    assert 0.95 * size < whole.total <= size
    with count_bytes_read(monkeypatch) as part:
        model = cut_and_read(tmp_path, 0)
    kept = sum(weight.nbytes for weight in model.parameters())
    assert kept < 0.65 * size
    assert part.total <= 1.02 * kept


@pytest.mark.parametrize("are_alike", [True, False])
def test_a_head_that_is_stored_beside_the_embedding_that_it_is_tied_to(
    are_alike: bool, tmp_path: Path
):
    make_model("qwen3", tie_word_embeddings=False, num_hidden_layers=1).save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights = load_file(file)
    if are_alike:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    model = th.from_pretrained(tmp_path)
    assert_same_bits(model, th.adapt(load_with_transformers(tmp_path)))
    head, embedding = model.hf_model.lm_head, model.hf_model.model.embed_tokens
    assert (head.weight is embedding.weight) == are_alike
