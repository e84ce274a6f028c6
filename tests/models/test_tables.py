"""Tables of n-gram embeddings: on the device of the model, or on the host beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.tiny_models import FEWEST_LAYERS, make_model
from torch_hybrid.layers.ngram_embedding import NgramEmbedding

SIZES = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": 256, "compile": False}
PROMPTS = [[5, 3, 8, 7, 8, 1, 4] * 4, [9, 2, 6] * 7, [11]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen4_exp")
    make_model("qwen4_exp", **FEWEST_LAYERS["qwen4_exp"]).save_pretrained(path)
    return path


def tables_of(model: th.HybridModel) -> list[torch.Tensor]:
    found = [part.table for part in model.modules() if isinstance(part, NgramEmbedding)]
    assert found
    return found


def test_a_model_on_the_host_has_them_there(checkpoint: Path):
    model = th.from_pretrained(checkpoint, tables="host")
    like = th.from_pretrained(checkpoint)
    for table, other in zip(tables_of(model), tables_of(like), strict=True):
        assert torch.equal(table, other)


@needs_cuda
def test_pinned_beside_a_gpu(checkpoint: Path):
    """The same tokens; and new weights reach them."""
    tokens = {}
    for tables in ("device", "host"):
        model = th.from_pretrained(checkpoint, device="cuda", tables=tables)
        found = tables_of(model)
        assert {table.is_cpu for table in found} == {tables == "host"}
        assert all(table.is_pinned() for table in found) == (tables == "host")
        assert model.device.type == "cuda"
        engine = th.Engine(th.Runner(model, **SIZES))
        sampling = th.Sampling(max_new_tokens=12, ignore_eos=True)
        outputs = sorted(engine.generate(PROMPTS, sampling), key=lambda output: output.index)
        tokens[tables] = [output.tokens for output in outputs]
    assert tokens["host"] == tokens["device"]
    name = next(n for n in _stored(checkpoint) if "ngram_embedding" in n)
    values = _stored(checkpoint)[name]
    engine.runner.update_weights({name: values + 1}, partial=True)
    assert any((table == (values + 1)[0]).all(1).any() for table in found)


def _stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


def test_places_that_cannot_be(checkpoint: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="tables must be 'device' or 'host', got 'disk'"):
        th.from_pretrained(checkpoint, tables="disk")
    make_model("qwen3", **FEWEST_LAYERS["qwen3"]).save_pretrained(tmp_path)
    with pytest.raises(th.UnsupportedError, match="for models that embed n-grams, and this one"):
        th.from_pretrained(tmp_path, tables="host")
