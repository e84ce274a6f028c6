"""A load that ends early, by an error or by Ctrl-C, leaves the process as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, initialization
from transformers.utils import logging

import torch_hybrid as th
from tests.hostile.test_calls_in_contexts import CONTEXTS, LAYERS, logits, process
from tests.tiny_models import make_model
from torch_hybrid.errors import UnsupportedError

# Functions that a load calls, by what they do: makes modules, is handed tensors, ends the loading
# of transformers, swaps mixers, reads weights.
PLACES = (
    "torch.nn.Linear.__init__",
    "torch_hybrid.models.stacked_experts.stack_experts",
    "transformers.PreTrainedModel._initialize_missing_keys",
    "transformers.PreTrainedModel._finalize_model_loading",
    "transformers.GenerationConfig.from_pretrained",
    "torch_hybrid.models.load.adapted",
    "torch_hybrid.models.load.read_weights",
    "torch_hybrid.models.checkpoint.read._read_all",
)


def state() -> tuple[object, ...]:
    inits = [vars(torch.nn.init)[name] for name in initialization.TORCH_INIT_FUNCTIONS]
    return (*process(), *inits, PreTrainedModel.tie_weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3_next_dense", **LAYERS).save_pretrained(path)
    return path


@pytest.mark.parametrize("context", ["float64", "thread"])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c(place: str, context: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def load() -> None:
        before = state()
        with monkeypatch.context() as patched:
            patched.setattr(place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                th.from_pretrained(folder)
        assert state() == before

    before, verbosity = state(), logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        CONTEXTS[context](load)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(verbosity)
    assert state() == before
    assert logits(th.from_pretrained(folder))


@pytest.mark.parametrize("fault", ["missing", "misshapen", "truncated", "unknown field"])
def test_errors(fault: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    if fault == "missing":
        del weights[name]
    elif fault == "misshapen":
        weights[name] = weights[name][1:].clone()
    elif fault == "unknown field":
        config["hidden_act"] = "unknown"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    if fault == "truncated":
        whole = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    before = state()
    with pytest.raises((ValueError, UnsupportedError)):
        th.from_pretrained(tmp_path, dtype=torch.float64)
    assert state() == before
