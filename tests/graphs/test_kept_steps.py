"""Steps that the user's cache keeps: the next runner of the same facts starts from them."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_hybrid as th
from tests.tiny_models import COMPILED_SIZES, make_hybrid
from torch_hybrid.graphs.artefact import kept
from torch_hybrid.graphs.compiling.sources import UNKNOWN, changed_sources, sources_of
from torch_hybrid.graphs.runner import Runner

SIZES: dict[str, Any] = {**COMPILED_SIZES, "prefill": False}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of kept steps, in place of the user's own."""
    monkeypatch.setenv("TORCH_HYBRID_STEP_CACHE", "1")
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "steps"


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ModuleType]:
    """Writes a user's module with a function that a layer calls, and imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = "module_of_a_user"

    def write(expression: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(f"def change(x):\n    return {expression}\n")
        importlib.invalidate_caches()
        sys.modules.pop(name, None)
        monkeypatch.setitem(sys.modules, name, module := importlib.import_module(name))
        return module

    return write


def make_model(norm: nn.Module | None = None) -> th.HybridModel:
    model = make_hybrid(num_hidden_layers=1, layer_types=["linear_attention"])
    if norm is not None:
        model.hf_model.model.norm = norm
    return model


def served(model: th.HybridModel, **options: Any) -> tuple[bool, Tensor]:
    """Whether the step was loaded, and its logits; nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runner = Runner(model, **SIZES, **options)
        logits = runner.extend(runner.new_sequences(2), [[3], [7]])
    return runner.report().graphs["decode"].is_loaded, logits


@pytest.mark.slow
def test_the_second_runner_of_a_kind_neither_traces_nor_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    is_loaded, first = served(make_model())
    assert not is_loaded
    is_loaded, second = served(make_model())
    assert is_loaded
    assert torch.equal(first, second)
    # Other implementations have a file of their own, and what is broken is written anew.
    assert not served(make_model(), backends=th.Backends(conv="torch"))[0]
    files = [*folder.iterdir()]
    assert len(files) == 2
    for file in files:
        file.write_bytes(b"cut")
    assert [served(make_model())[0] for _ in range(2)] == [False, True]
    monkeypatch.setenv("TORCH_HYBRID_STEP_CACHE", "0")
    assert not served(make_model())[0]


@pytest.mark.slow
def test_steps_are_those_of_the_code_that_they_call(
    folder: Path, helper: Callable[[str], ModuleType]
):
    """A function of another file than the layer's class, which no fact of the model tells."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sys.modules["module_of_a_user"].change(x)  # type: ignore[no-any-return]

    results = {}
    for expression in ("x * 2", "x * 3"):
        helper(expression)
        is_loaded, results[expression] = served(make_model(Own()))
        assert not is_loaded
        assert served(make_model(Own()))[0]
    assert not torch.equal(*results.values())


def test_code_of_no_file_is_unknown(helper: Callable[[str], ModuleType]):
    in_notebook: dict[str, Any] = {}
    exec(compile("def change(x): return x", "/tmp/cell.py", "exec"), in_notebook)
    module = helper("x + 1")
    traced = [f.__code__ for f in (module.change, in_notebook["change"], nn.Linear.forward)]
    sources = sources_of(traced)
    assert sources == {"module_of_a_user": sources["module_of_a_user"], "/tmp/cell.py": UNKNOWN}
    assert not changed_sources(sources)
    helper("x + 2")
    assert changed_sources(sources) == ["module_of_a_user"]


def test_few_files_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept, "_MOST", 2)
    paths = [kept.kept_path({"model": name}) for name in "abc"]
    for path in paths:
        assert path is not None
        path.write_text("")
        kept.drop_oldest(folder)
    assert {*folder.iterdir()} == {*paths[1:]}
    assert kept.kept_path({"model": "a"}) == paths[0]  # for its name tells its facts


def test_nothing_is_kept_where_torch_keeps_nothing(folder: Path):
    with torch.compiler.config.patch(force_disable_caches=True):
        assert kept.kept_path({}) is None
    assert not folder.exists()
