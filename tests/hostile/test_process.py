"""Loading leaves the settings of the process alone, and models of several threads apart."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import logging

import torch_hybrid as th
from tests.host.test_surroundings import SURROUNDINGS, logits_of
from tests.tiny_models import make_model
from tests.tiny_vision import BUILDERS, make_vision_model

SIZES = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": 192, "page_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3_next_dense").save_pretrained(path)
    return path


def test_threads_load_in_their_own_dtypes_beside_others_code(folder: Path) -> None:
    verbosity, others, wrong = logging.get_verbosity(), set(), []
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            others.add(torch.zeros(1).dtype)

    def load(dtype: torch.dtype) -> None:
        for _ in range(3):
            model = th.from_pretrained(folder, dtype=dtype)
            wrong.extend(w.dtype for w in model.parameters() if w.dtype not in (dtype,))

    watcher = threading.Thread(target=watch)
    threads = [threading.Thread(target=load, args=(d,)) for d in (torch.float32, torch.float64)]
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_done.set()
    watcher.join()
    assert not wrong
    assert others == {torch.float32}
    assert logging.get_verbosity() == verbosity


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_loaded_in_any_surroundings(folder: Path, surrounding: str) -> None:
    expected = logits_of(th.Runner(th.from_pretrained(folder), compile=False, **SIZES))
    with SURROUNDINGS[surrounding]():
        model = th.from_pretrained(folder)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    found = logits_of(th.Runner(model, compile=False, **SIZES))
    assert all(map(torch.equal, found, expected))


@torch.inference_mode()
def make_weights_of_inference_mode(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            made = torch.nn.Parameter(weight.clone(), requires_grad=False)
            setattr(module, name, made)
        for name, values in list(module.named_buffers(recurse=False)):
            setattr(module, name, values.clone())


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("when", ["before adapt", "before Runner"])
def test_weights_that_were_made_in_inference_mode(weights: str, when: str) -> None:
    def served(*, in_inference_mode: bool) -> list[Tensor]:
        hf_model = make_model("qwen3_next_dense")
        if in_inference_mode and when == "before adapt":
            make_weights_of_inference_mode(hf_model)
        model = th.adapt(hf_model)
        if weights != "auto":
            th.quantize(model, weights)
        if in_inference_mode and when == "before Runner":
            make_weights_of_inference_mode(model)
        runner = th.Runner(model, compile=False, **SIZES)
        assert not any(tensor.is_inference() for tensor in model.state_dict().values())
        for weight in model.parameters():
            weight.mul_(1)
        return logits_of(runner)

    expected = served(in_inference_mode=False)
    assert all(map(torch.equal, served(in_inference_mode=True), expected))


def test_new_weights_that_were_made_in_inference_mode(folder: Path) -> None:
    runner = th.Runner(th.from_pretrained(folder), compile=False, **SIZES)
    expected = logits_of(runner)
    with torch.inference_mode():
        weights = {name: w.clone() for name, w in load_file(folder / "model.safetensors").items()}
        doubled = {name: 2 * w for name, w in weights.items()}
    runner.update_weights(doubled)
    assert not torch.equal(logits_of(runner)[0], expected[0])
    runner.update_weights(weights)
    assert all(map(torch.equal, logits_of(runner), expected))


@pytest.mark.parametrize("family", BUILDERS)
def test_no_default_dtype_is_set_for_the_process(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vision_model(family).save_pretrained(tmp_path)
    expected = th.from_pretrained(tmp_path, vision=True, dtype=torch.bfloat16).state_dict()

    def refuse(dtype: torch.dtype) -> None:
        raise AssertionError(f"the process's default dtype would be {dtype}")

    monkeypatch.setattr(torch, "set_default_dtype", refuse)
    found = th.from_pretrained(tmp_path, vision=True, dtype=torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype is expected[name].dtype
        assert torch.equal(tensor, expected[name])
