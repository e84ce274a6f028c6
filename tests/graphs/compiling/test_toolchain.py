"""A machine without a compiler, or without room for what is compiled: one line that says so."""

import os
import sysconfig
from pathlib import Path

import pytest
import torch

import torch_hybrid as th
from tests.errors import error_text
from tests.tiny_models import make_hybrid
from torch_hybrid.graphs.compiling import toolchain
from torch_hybrid.ops.native.build import compiler_missing, native_instructions

CPU = torch.device("cpu")
SIZES = {"max_seqs": 1, "max_tokens": 64, "kv_tokens": 64}


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """As if g++ were not installed: Inductor looks for it in PATH."""
    from torch._inductor.cpp_builder import cpp_compiler_search

    known = (cpp_compiler_search, compiler_missing)
    for function in known:
        function.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    for function in known:
        function.cache_clear()


@pytest.fixture
def not_a_folder(tmp_path):
    """Where no folder can be made, whoever tries."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


def refused(**options):
    return error_text(th.UnsupportedError, th.Runner, make_hybrid(), **SIZES, **options)


def test_nothing_is_missing_here():
    if toolchain.missing_tools(CPU):
        pytest.skip("there is no C++ compiler")
    toolchain.check_toolchain(CPU)


def test_a_compiled_runner_names_the_compiler_to_install(no_compiler):
    message = refused(compile=True)
    assert message.startswith("compile=True cannot be: no C++ compiler (g++ does not run)")
    assert "install g++ (Debian, Ubuntu: apt install g++), or name yours in CXX" in message
    assert message.endswith("compile=False runs uncompiled")
    assert "\n" not in message


def test_without_a_compiler_an_uncompiled_runner_works(no_compiler):
    runner = th.Runner(make_hybrid(), **SIZES, compile=False)
    assert runner.extend(runner.new_sequences(1), [[1, 2]]).isfinite().all()


def test_pythons_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(tmp_path))
    assert f"no Python.h in {tmp_path}: install Python's headers" in toolchain.missing_tools(CPU)
    monkeypatch.setenv("CPATH", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "Python.h").write_text("")
    assert toolchain.missing_tools(CPU) is None


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch, not_a_folder):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(not_a_folder))
    message = refused()
    assert f"Not a directory: '{not_a_folder}'" in message
    assert f"name another folder in TORCHINDUCTOR_CACHE_DIR, now {not_a_folder}" in message


def test_a_checkpoint_is_not_blamed_for_a_cache_folder(monkeypatch, not_a_folder, tmp_path):
    make_hybrid().hf_model.config.save_pretrained(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(not_a_folder))
    with pytest.raises(th.UnsupportedError, match="torch's compile cache cannot be written"):
        th.from_pretrained(tmp_path)


def test_a_full_disk_is_found_before_anything_is_compiled(monkeypatch):
    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(toolchain, "_write", full)
    assert "No space left on device" in refused()


def test_a_cache_that_another_cpu_has_filled(monkeypatch, tmp_path):
    """Two machines may share the folder: what one cannot run is named, not run."""
    here = native_instructions()
    if here is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    note = tmp_path / toolchain._NOTE
    toolchain.check_cached_instructions()
    assert {*note.read_text().split()} == here
    older = sorted(here)[1:]
    note.write_text(" ".join(older))
    toolchain.check_cached_instructions()
    assert {*note.read_text().split()} == here, "what is compiled from now on has more"
    note.write_text(" ".join([*older, "AVX9000"]))
    message = refused()
    assert message == (
        f"torch's compile cache {tmp_path} may hold code for another CPU, with AVX9000: name a "
        f"folder for this kind of CPU in TORCHINDUCTOR_CACHE_DIR"
    )


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (OSError(28, "No space left on device"), "cache cannot be written .*No space left"),
        (RuntimeError("of another kind"), None),
    ],
)
def test_a_compilation_that_fails_for_the_machine_is_one_line(cause, message):
    def backend(graph, inputs):
        raise cause

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    expected = th.UnsupportedError if message else torch._dynamo.exc.BackendCompilerFailed
    with pytest.raises(expected, match=message), toolchain.named_failures():
        compiled(torch.ones(2))


def test_a_compiler_that_fails_is_quoted():
    from torch._inductor.exc import CppCompileError

    def backend(graph, inputs):
        raise CppCompileError(["g++"], "In file x\nfatal error: iostream: No such file")

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with pytest.raises(th.UnsupportedError) as caught, toolchain.named_failures():
        compiled(torch.ones(2))
    expected = "the C++ compiler failed: fatal error: iostream: No such file; compile=False runs"
    assert str(caught.value).startswith(expected)


def test_kernels_of_a_gpu_are_kept_where_inductor_keeps_its_own(monkeypatch):
    """Each runner sees to it that compiles, or takes compiled steps from an artefact."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back, where it is not set too
    monkeypatch.delenv("TRITON_CACHE_DIR")
    toolchain.share_triton_cache(CPU)
    assert "TRITON_CACHE_DIR" not in os.environ
    toolchain.share_triton_cache(torch.device("cuda", 1))
    assert Path(os.environ["TRITON_CACHE_DIR"]).parts[-2:] == ("triton", "1")
    toolchain.share_triton_cache(torch.device("cuda", 0))
    assert Path(os.environ["TRITON_CACHE_DIR"]).parts[-2:] == ("triton", "1")
