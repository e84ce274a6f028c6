"""Compiled steps in a file: served by a process that neither traces nor compiles, refused by what
they were not made for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.tiny_models import COMPILED_SIZES, VOCAB_SIZE, make_hybrid
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.artefact import triton_kernels
from torch_hybrid.graphs.artefact.facts import facts_of
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass, without
from torch_hybrid.graphs.runner import Runner

# Of one kind of step; what has two: ``test_an_artefact_is_written_as_soon_as_a_step_is_compiled``.
SIZES: dict[str, Any] = {**COMPILED_SIZES, "prefill": False}
DECODE = [[[3], [7], [9]], [[1], [2], [3]], [[4], [5], [6]]]
PREFILL = [[[3] * 40, [7], [9, 9, 9]], [[1], [2], [3]], [[4], [5, 6], [7] * 9]]


def make_model(num_layers: int = 6, **options: Any) -> th.HybridModel:
    """Layers of two kinds, of which the last are copied."""
    kinds = ["linear_attention", "full_attention"] * (num_layers // 2)
    return make_hybrid(num_hidden_layers=num_layers, layer_types=kinds, **options)


def serve(runner: Runner, steps: list[list[list[int]]] = DECODE) -> Tensor:
    seqs = runner.new_sequences(3)
    logits = torch.cat([runner.extend(seqs, tokens) for tokens in steps])
    runner.free(seqs)
    return logits


@pytest.fixture(scope="module")
def model() -> th.HybridModel:
    return make_model()


@pytest.fixture(scope="module")
def compiled(model: th.HybridModel) -> Runner:
    return Runner(model, **SIZES)


@pytest.fixture(scope="module")
def saved(compiled: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefact") / "steps"
    compiled.save(path)
    return path


def without_compilers(folder: Path) -> dict[str, str]:
    """Surroundings of a machine that has never compiled anything, and cannot."""
    return {
        "PATH": str(folder / "no programs"),
        "HOME": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCH_HYBRID_CACHE": str(folder / "kernels"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }


@pytest.mark.slow
def test_a_machine_without_a_compiler_serves_what_another_compiled(
    compiled: Runner, saved: Path, tmp_path: Path
):
    code = f"""
        import sys, torch
        import torch_hybrid as th
        from tests.graphs import test_artefact
        torch.set_num_threads({torch.get_num_threads()})
        model = test_artefact.make_model()
        runner = th.Runner(model, **test_artefact.SIZES, artefact={str(saved)!r})
        torch.save(test_artefact.serve(runner), {str(tmp_path / "logits")!r})
        assert all(graph.is_loaded for graph in runner.report().graphs.values())
        assert not torch._dynamo.utils.counters["stats"], "a step was traced"
        assert "torch._inductor.compile_fx" not in sys.modules or not \\
            torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
    """
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:torch_hybrid", "-c", textwrap.dedent(code)],
        env=os.environ | without_compilers(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert torch.equal(torch.load(tmp_path / "logits"), serve(compiled))


@pytest.mark.slow
def test_a_runner_that_loaded_steps_saves_them_again(
    model: th.HybridModel, compiled: Runner, saved: Path, tmp_path: Path
):
    again = tmp_path / "again"
    loaded = Runner(model, **SIZES, artefact=saved)
    loaded.save(again)
    assert loaded.report().recompiles == 0
    assert torch.equal(serve(Runner(model, **SIZES, artefact=again)), serve(compiled))


@pytest.mark.slow
def test_an_artefact_is_written_as_soon_as_a_step_is_compiled(tmp_path: Path):
    """Not when all are, nor when somebody asks for it; and what was in it stays in it."""
    path, one_layer = tmp_path / "steps", {"layer_types": ["linear_attention"]}
    model = make_hybrid(num_hidden_layers=1, **one_layer)
    [prompts, *others] = PREFILL

    def served(steps: list[list[list[int]]], **options: Any) -> tuple[dict[str, bool], Tensor]:
        runner = Runner(model, **SIZES | options, artefact=path)
        logits = serve(runner, steps)
        return {name: g.is_loaded for name, g in runner.report().graphs.items()}, logits

    assert not path.exists()
    assert served(others[:1])[0] == {"decode": False}
    assert path.exists()
    # Steps of a runner with more variants are those of the file, and the others are added to it.
    assert served([prompts], prefill=True)[0] == {"extend": False}
    are_loaded, logits = served(PREFILL, prefill=True)
    assert are_loaded == {"decode": True, "extend": True}
    assert torch.equal(logits, serve(Runner(model, **SIZES | {"prefill": True}), PREFILL))


def refusal(path: Path, model: th.HybridModel, **options: Any) -> str:
    with pytest.warns(UserWarning, match="steps are compiled anew") as caught:
        Runner(model, **{**SIZES, **options}, artefact=path)
    [message] = [w for w in caught if str(path) in str(w.message)]
    assert message.filename == __file__
    return str(message.message).replace(str(path), "FILE")


@pytest.mark.slow
class TestRefused:
    def test_other_sizes(self, model: th.HybridModel, saved: Path):
        assert refusal(saved, model, kv_tokens=512, max_seqs=2) == (
            "FILE was made for something else (max_seqs: 12 there, 2 here; "
            "kv_tokens: 1600 there, 512 here); steps are compiled anew"
        )

    def test_another_number_of_threads(self, model: th.HybridModel, saved: Path):
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        try:
            message = refusal(saved, model)
        finally:
            torch.set_num_threads(before)
        assert f"(threads: {before} there, {before + 1} here)" in message

    def test_other_passes(self, model: th.HybridModel, saved: Path):
        passes = without(DEFAULT_PASSES, ["merge_linears"])
        assert "passes: " in refusal(saved, model, passes=passes)

    def test_another_model(self, saved: Path):
        assert "model: " in refusal(saved, make_model(rms_norm_eps=1e-3))
        assert "model: " in refusal(saved, make_model(num_layers=4))

    def test_what_is_no_artefact(self, model: th.HybridModel, saved: Path, tmp_path: Path):
        text, cut, other = tmp_path / "text", tmp_path / "cut", tmp_path / "other.zip"
        text.write_text("no zip")
        cut.write_bytes(saved.read_bytes()[:-2000])
        zipfile.ZipFile(other, "w").close()
        for path in (text, cut, other):
            assert refusal(path, model).startswith("FILE is no artefact of torch_hybrid: ")

    def test_bytes_that_changed(self, model: th.HybridModel, saved: Path, tmp_path: Path):
        path = tmp_path / "changed"
        data = bytearray(saved.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
        assert "FILE is no artefact of torch_hybrid: " in refusal(path, model)

    def test_a_pass_of_the_same_name_and_other_code(self, model: th.HybridModel, saved: Path):
        first, *others = DEFAULT_PASSES
        passes = (Pass(first.name, lambda graph: None), *others)
        assert "passes: " in refusal(saved, model, passes=passes)


def test_kernels_of_triton_come_with_the_steps(
    model: th.HybridModel, compiled: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that has the artefact finds in its own cache what an op launches."""
    triton, cache = pytest.importorskip("triton"), pytest.importorskip("triton.runtime.cache")
    monkeypatch.setattr(triton_kernels, "_USED", set())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    hash_of_kernel = "0f" * 32
    with triton.knobs.cache.scope():
        triton_kernels.note_kernels()
        kept = cache.get_cache_manager(hash_of_kernel)
        files = {"k.cubin": b"\0\1", "k.ttir": b"to read", "k.json": b"{}"}
        kept.put_group("k.json", {name: kept.put(data, name) for name, data in files.items()})
        compiled.save(tmp_path / "steps")
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
        Runner(model, artefact=tmp_path / "steps", **SIZES)
        found = cache.get_cache_manager(hash_of_kernel).get_group("k.json")
    assert {name: Path(path).read_bytes() for name, path in found.items()} == {
        name: files[name] for name in ("k.cubin", "k.json")
    }
    assert all(Path(path).is_relative_to(tmp_path / "there") for path in found.values())


def test_facts_know_the_code_of_a_notebook(monkeypatch: pytest.MonkeyPatch):
    """Its classes stand in no file."""
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    model = make_model(2)

    def facts(expression: str) -> str:
        cell = f"""
            from torch import nn

            class Own(nn.Module):
                def forward(self, x):
                    return [{expression} for _ in x]
        """
        exec(textwrap.dedent(cell), vars(notebook))
        model.add_module("own", notebook.Own())
        return facts_of(model, DEFAULT_PASSES)["model"]

    assert facts("x + 1") == facts("x + 1")
    assert len({facts(each) for each in ("x + 1", "x + 2", "x - 1", "x.sin()", "x.cos()")}) == 5


def test_facts_do_not_depend_on_values_or_on_the_process(model: th.HybridModel):
    facts = facts_of(model, DEFAULT_PASSES, max_seqs=4)
    assert facts == facts_of(make_model(seed=1), DEFAULT_PASSES, max_seqs=4)


def test_a_runner_that_compiles_nothing_has_nothing_to_save(model: th.HybridModel, tmp_path: Path):
    runner = Runner(model, **SIZES, compile=False)
    with pytest.raises(UnsupportedError, match="compile=False has no compiled steps to save"):
        runner.save(tmp_path / "steps")
    with pytest.raises(ValueError, match="an artefact has compiled steps, got compile=False"):
        Runner(model, **SIZES, compile=False, artefact=tmp_path / "steps")


def test_a_folder_that_is_not_there_is_named_before_anything_is_compiled(
    model: th.HybridModel, tmp_path: Path
):
    path = tmp_path / "nowhere" / "steps"
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Runner(model, **SIZES, artefact=path)
    expected = f"cannot write an artefact to {path}: the folder is not there"
    assert str(caught.value) == expected


@pytest.mark.slow
def test_a_file_that_cannot_be_written_leaves_the_one_that_is_there(
    model: th.HybridModel,
    compiled: Runner,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    path = tmp_path / "steps"
    shutil.copy(saved, path)
    runner = Runner(model, **SIZES, artefact=path)
    monkeypatch.setattr(zipfile.ZipFile, "write", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        runner.save(path)
    assert path.read_bytes() == saved.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["steps"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Runner(model, **SIZES, artefact=path)
    # Steps that were compiled serve, written or not.
    monkeypatch.setattr(compiled._steps._store, "path", path)
    monkeypatch.setattr(compiled._steps._store, "is_kept", False)
    with pytest.warns(UserWarning, match=r"no artefact is written to .*: full"):
        compiled._steps.save_if_new()


@pytest.mark.slow
def test_a_tensor_that_has_no_name_cannot_be_saved(
    model: th.HybridModel, saved: Path, tmp_path: Path
):
    runner = Runner(model, **SIZES, artefact=saved)
    runner.warm_up()
    runner._steps._store._named.pop("model.hf_model.model.embed_tokens.weight")
    with pytest.raises(UnsupportedError) as caught:
        runner.save(tmp_path / "steps")
    shape = (VOCAB_SIZE, 32)
    assert str(caught.value) == (
        f"decode steps cannot be saved: a tensor of shape {shape} has no name in the model"
    )
