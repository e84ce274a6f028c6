"""Implementations that are entered from where no module is imported: scripts, notebooks, exec()."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.tiny_models import make_hybrid
from torch_hybrid.ops.causal_conv1d.op import IMPLEMENTATIONS
from torch_hybrid.ops.core.capability import Capability, Implementation
from torch_hybrid.ops.native import ahead

ON_CPU = Capability(devices=frozenset({"cpu"}))
CELL = """
from torch_hybrid.ops.causal_conv1d.op import causal_conv1d

def mine(*args, **options):
    calls.append({answer})
    return causal_conv1d(*args, **options, impl="torch")
"""


def run_cell(module: ModuleType, answer: int) -> None:
    exec(CELL.format(answer=answer), vars(module))


@pytest.fixture(params=["__main__", "__mp_main__", "__console__"])
def notebook(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module without a spec and without a file, as an interpreter makes it."""
    module = ModuleType(request.param)
    module.calls = []
    monkeypatch.setitem(sys.modules, request.param, module)
    run_cell(module, 1)
    return module


@pytest.mark.parametrize("by_name", [True, False])
def test_a_runner_takes_one_of_a_notebook(
    notebook: ModuleType, monkeypatch: pytest.MonkeyPatch, by_name: bool
):
    launcher: Any = f"{notebook.__name__}:mine" if by_name else notebook.mine
    monkeypatch.setitem(
        IMPLEMENTATIONS, "mine", Implementation(capability=ON_CPU, launcher=launcher)
    )
    options = {"max_seqs": 2, "max_tokens": 32, "kv_tokens": 32, "compile": False}
    logits = []
    for conv in ("mine", "torch"):
        runner = th.Runner(
            make_hybrid("qwen3_next_dense"), **options, backends=th.Backends(conv=conv)
        )
        logits.append(runner.extend(runner.new_sequences(1), [[1, 2, 3]]))
    torch.testing.assert_close(*logits)
    assert notebook.calls


def test_a_cell_that_runs_again_defines_another(notebook: ModuleType):
    implementation = Implementation(capability=ON_CPU, launcher=f"{notebook.__name__}:mine")
    assert implementation.load() is notebook.mine
    run_cell(notebook, 2)
    assert implementation.load() is notebook.mine


def test_one_that_is_imported_is_looked_up_once(monkeypatch: pytest.MonkeyPatch):
    implementation = IMPLEMENTATIONS["torch"]
    loaded = implementation.load()
    monkeypatch.setitem(sys.modules, loaded.__module__, ModuleType("another"))
    assert implementation.load() is loaded


def test_a_function_that_is_not_there_is_named():
    implementation = Implementation(capability=ON_CPU, launcher="builtins:mine")
    expected = (
        r"^module 'builtins' must have 'mine', .* code of exec\(\) gives the function itself$"
    )
    with pytest.raises(ImportError, match=expected):
        implementation.load()


@pytest.mark.parametrize("module", ["", "builtins", "no_such_package.module", "sys"])
def test_nothing_is_built_for_what_has_no_file(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Though files lie in the folder whose names begin as what stands for one."""
    (tmp_path / "b.cpp").write_text("int main() {}")
    monkeypatch.chdir(tmp_path)
    implementation = Implementation(
        capability=ON_CPU, launcher=f"{module}:run", figures=f"{module}:f"
    )
    assert not list(ahead._sources_of(implementation))


def test_nothing_is_built_for_a_notebook(notebook: ModuleType):
    launcher = f"{notebook.__name__}:mine"
    assert not list(ahead._sources_of(Implementation(capability=ON_CPU, launcher=launcher)))
    assert not list(ahead._sources_of(Implementation(capability=ON_CPU, launcher=notebook.mine)))
