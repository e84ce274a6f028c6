"""Loading leaves the settings of the process alone, and models of several threads apart."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

import torch_hybrid as th
from tests.hostile.test_surroundings import SURROUNDINGS, logits_of
from tests.tiny_models import make_model

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
