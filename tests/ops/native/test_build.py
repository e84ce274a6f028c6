"""The builder: its cache, its errors, and the one OpenMP runtime of the process."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.parallel.processes import FORKSERVER
from torch_hybrid.ops.core.capability import Capability, Implementation
from torch_hybrid.ops.native import BuildError, ahead, build, compiler_missing, load_library
from torch_hybrid.ops.native.ahead import build_ahead

needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))
OPENMP = Path(torch.__file__).with_name("lib") / "libgomp.so.1"
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() {{ return {}; }}\n'


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; what the builder remembers of this process is forgotten around the test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCH_HYBRID_CACHE", str(folder))
    monkeypatch.setattr(build, "_BROUGHT", {})
    forget()
    yield folder
    monkeypatch.undo()
    forget()


def forget() -> None:
    load_library.cache_clear()
    compiler_missing.cache_clear()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def answer(source: Path) -> int:
    return load_library("answer", source).answer()


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_c_compiler_builds_what_a_cpp_compiler_does(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter of PEFT leaves CXX=gcc in a process."""
    monkeypatch.setenv("CXX", "gcc")
    assert compiler_missing() is None
    assert libraries(cache_folder)


@needs_compiler
def test_built_once_and_again_when_the_source_changes(cache_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text(ANSWER.format(41))
    assert answer(source) == 41
    (built,) = libraries(cache_folder)
    stamp = built.stat().st_mtime_ns
    load_library.cache_clear()
    assert answer(source) == 41
    assert built.stat().st_mtime_ns == stamp
    load_library.cache_clear()
    source.write_text(ANSWER.format(42))
    assert answer(source) == 42
    assert len(libraries(cache_folder)) == 2


@needs_compiler
def test_a_changed_header_beside_the_source_rebuilds(cache_folder: Path, tmp_path: Path) -> None:
    source, header = tmp_path / "answer.cpp", tmp_path / "value.h"
    source.write_text('#include "value.h"\n' + ANSWER.format("VALUE"))
    for value in (1, 2):
        header.write_text(f"#define VALUE {value}\n")
        load_library.cache_clear()
        assert answer(source) == value


def counting(compiler: Path, runs: Path) -> None:
    """A compiler that notes in ``runs`` each time that it compiles."""
    counted = f'case " $* " in *" -c "*) echo built >> {runs};; esac'
    compiler.write_text(f'#!/bin/sh\n{counted}\nexec {build._find_compiler()} "$@"\n')
    compiler.chmod(0o755)


def answer_of_another(folder: Path, compiler: Path, source: Path, result: Connection) -> None:
    os.environ.update(TORCH_HYBRID_CACHE=str(folder), CXX=str(compiler))
    result.send(answer(source))


@needs_compiler
def test_processes_that_build_at_once_build_once(cache_folder: Path, tmp_path: Path) -> None:
    compiler, source, runs = (tmp_path / name for name in ("compiler", "answer.cpp", "runs"))
    source.write_text(ANSWER.format(7))
    counting(compiler, runs)
    ours, theirs = FORKSERVER.Pipe(duplex=False)
    options = (cache_folder, compiler, source, theirs)
    processes = [FORKSERVER.Process(target=answer_of_another, args=options) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [ours.recv() for _ in processes] == [7, 7, 7]
    assert runs.read_text().split() == ["built"]


@needs_compiler
def test_what_was_chosen_is_built_ahead(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each, beside who asks; and what does not compile is told to who calls it."""
    compiler, runs = tmp_path / "compiler", tmp_path / "runs"
    counting(compiler, runs)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.syspath_prepend(tmp_path)
    codes = {"ahead_one": ANSWER.format(1), "ahead_two": ANSWER.format(2), "ahead_bad": "int f("}
    modules = ["ahead_one", "ahead_two_invariant", "ahead_bad"]
    for (name, code), module in zip(codes.items(), modules, strict=True):
        (tmp_path / f"{name}.cpp").write_text(code)
        (tmp_path / f"{module}.py").write_text("")
    of_torch = Implementation(capability=Capability(devices=frozenset()), launcher="json:loads")
    chosen = [replace(of_torch, launcher=f"{module}:run") for module in modules]
    told: list[str] = []
    monkeypatch.setattr(ahead, "tell", told.append)
    for _ in range(2):
        build_ahead([of_torch, chosen[0]], chosen[1:]).wait()
    seconds = -(-3 * ahead._SECONDS // min(os.cpu_count() or 1, 3))
    assert told == [f"building C++ kernels: 3, once for this machine, in about {seconds} s"]
    assert runs.read_text().split() == ["built"] * 3
    assert len(libraries(cache_folder)) == 2
    for value, name in enumerate(("ahead_one", "ahead_two"), start=1):
        assert load_library(tmp_path.name, tmp_path / f"{name}.cpp").answer() == value
    assert runs.read_text().split() == ["built"] * 3
    with pytest.raises(BuildError, match=r"ahead_bad.cpp"):
        load_library(tmp_path.name, tmp_path / "ahead_bad.cpp")
    monkeypatch.setattr(ahead, "_STARTED", {})  # as in the next process
    build_ahead(chosen[:2]).wait()
    assert len(told) == 1, "nothing is built"


@needs_compiler
def test_what_is_called_first_is_built_first(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it does not wait for the others."""
    compiler, goes_on = tmp_path / "compiler", tmp_path / "goes on"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*a_late.cpp*) while [ ! -e "{goes_on}" ]; do sleep 0.01; '
        f'done;; esac\nexec {build._find_compiler()} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.syspath_prepend(tmp_path)
    for value, name in enumerate(("b_early", "a_late")):
        (tmp_path / f"{name}.cpp").write_text(ANSWER.format(value))
        (tmp_path / f"{name}.py").write_text("")
    early, late = (
        Implementation(capability=Capability(devices=frozenset()), launcher=f"{name}:run")
        for name in ("b_early", "a_late")
    )
    builds = build_ahead([early], [late])
    try:
        builds.wait_for_first()
        assert len(libraries(cache_folder)) == 1
        assert not builds.are_done
    finally:
        goes_on.touch()
    builds.wait()
    assert builds.are_done
    assert len(libraries(cache_folder)) == 2


@needs_compiler
def test_whoever_waits_too_long_builds_too(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever builds may have been stopped."""
    monkeypatch.setattr(build, "_PATIENCE", 0.1)
    source = tmp_path / "answer.cpp"
    source.write_text(ANSWER.format(7))
    assert answer(source) == 7
    [library] = libraries(cache_folder)
    library.unlink()
    load_library.cache_clear()
    with build._in_turn(library):
        assert answer(source) == 7
    assert library.exists()


@needs_compiler
def test_a_source_that_does_not_compile(cache_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() { return undeclared_name; }\n")
    with pytest.raises(BuildError, match="undeclared_name") as error:
        load_library("broken", source)
    assert str(source) in str(error.value)
    assert "-march=native" in str(error.value)
    assert [path.suffix for path in cache_folder.iterdir()] in ([], [".lock"])


@needs_compiler
def test_clang_calls_an_openmp_that_torch_has_not(cache_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "by_clang.cpp"
    source.write_text('extern "C" int __kmpc_no();\nextern "C" int f() { return __kmpc_no(); }\n')
    with pytest.raises(BuildError, match=r"__kmpc_no.*install g\+\+, or name libomp.so in LD_PREL"):
        load_library("by_clang", source)


def test_apples_clang_is_told_of_openmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver refuses -fopenmp, it has no omp.h, and its linker wants every symbol defined."""
    compiler, commands = tmp_path / "compiler", tmp_path / "commands"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {commands}\nfor last; do :; done\n: > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(sys, "platform", "darwin")
    spec = importlib.util.spec_from_file_location("build_on_macos", build.__file__)
    assert spec is not None
    assert spec.loader is not None
    on_macos = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_macos)
    on_macos.build_for("native", build.HEADERS / "probe.cpp", tmp_path / "probe.so")
    compiled, linked = commands.read_text().splitlines()
    assert "-Xclang -fopenmp" in compiled
    assert "-undefined dynamic_lookup" in linked
    assert "omp.h" not in (build.HEADERS / "probe.cpp").read_text()


@needs_compiler
def test_a_symbol_that_nothing_defines(cache_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "unresolved.cpp"
    source.write_text('extern "C" int nowhere();\nextern "C" int f() { return nowhere(); }\n')
    with pytest.raises(BuildError, match=r"does not load.*nowhere"):
        load_library("unresolved", source)


def test_no_compiler(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = compiler_missing()
    assert reason == "no C++ compiler was found (looked for $CXX, g++, c++, clang++)"
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        load_library("answer", Path("answer.cpp"))


def test_a_compiler_that_fails(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fake-g++"
    fake.write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    reason = str(compiler_missing())
    assert "exited with 3" in reason
    assert "no licence" in reason


@needs_compiler
def test_a_cache_that_cannot_be_written(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TORCH_HYBRID_CACHE", str(blocked / "cache"))
    assert "TORCH_HYBRID_CACHE" in str(compiler_missing())


@needs_compiler
def test_compiler_macros_are_part_of_the_key() -> None:
    compiler = build._find_compiler()
    assert compiler is not None
    assert "__VERSION__" in build._target(compiler)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64-v3 is of x86")
def test_instructions_that_this_cpu_lacks_are_named_and_never_run(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build._find_compiler()
    assert compiler is not None
    of_march = {march: build._instructions(compiler, march) for march in ("x86-64-v3", "native")}
    assert {"AVX2", "FMA"} <= of_march["x86-64-v3"]
    of_march["native"] -= {"AVX2", "FMA"}  # as of a CPU that is older
    monkeypatch.setattr(build, "_instructions", lambda _, march: of_march[march])
    monkeypatch.setenv(build.MARCH, "x86-64-v3")
    lacking = "TORCH_HYBRID_MARCH=x86-64-v3 has what this CPU lacks: AVX2 FMA"
    assert compiler_missing() == f"the C++ compiler cannot build kernels: {lacking}"


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64-v2 and v3 are of x86")
def test_machines_that_share_a_cache_have_libraries_of_their_own(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has AVX2, the first, which comes back, has not."""
    source = tmp_path / "answer.cpp"
    of_machine = "\n#ifdef __AVX2__\n#define VALUE 2\n#else\n#define VALUE 1\n#endif\n"
    source.write_text(of_machine + ANSWER.format("VALUE"))
    for march, value in (("x86-64-v2", 1), ("x86-64-v3", 2), ("x86-64-v2", 1)):
        monkeypatch.setenv(build.MARCH, march)
        load_library.cache_clear()
        assert answer(source) == value
    assert len(libraries(cache_folder)) == 2


@needs_compiler
def test_one_openmp_runtime_in_the_process() -> None:
    code = """
import torch
from torch_hybrid.ops.native import load_library
from torch_hybrid.ops.native.build import HEADERS
kernel = load_library("probe", HEADERS / "probe.cpp").th_probe
torch.randn(300, 300) @ torch.randn(300, 300)
print(kernel(3), torch.get_num_threads())
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "omp" in line.rsplit("/", 1)[-1]}
print(*files, sep="\\n")
"""
    threads, *runtimes = run_python(code, OMP_NUM_THREADS="2").splitlines()
    assert threads == "3 2"
    assert len(runtimes) == 1, runtimes


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_thread_count_is_the_callers(num_threads: int) -> None:
    probe: ctypes.CDLL = load_library("probe", build.HEADERS / "probe.cpp")
    assert probe.th_probe(num_threads) == num_threads


# Torch as it is on Arm: its OpenMP runtime is loaded, and visible to nobody else.
HIDDEN_OPENMP = """
import ctypes, importlib.util, sys, types
from pathlib import Path
runtime, path = map(Path, sys.argv[1:])
ctypes.CDLL(str(runtime))
sys.modules["torch"] = types.ModuleType("torch")
for name, folder in (("", path), (".ops", path.parents[1]), (".ops.native", path.parent)):
    package = sys.modules[f"torch_hybrid{name}"] = types.ModuleType(f"torch_hybrid{name}")
    package.__path__ = [str(folder)]
spec = importlib.util.spec_from_file_location("build", path)
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
print(build.load_library("probe", path.with_name("probe.cpp")).th_probe(2))
"""


@needs_compiler
@pytest.mark.skipif(not OPENMP.exists(), reason="torch has another OpenMP runtime")
def test_a_runtime_that_torch_loads_for_itself_serves_kernels(cache_folder: Path) -> None:
    command = [sys.executable, "-c", HIDDEN_OPENMP, str(OPENMP), build.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2"], done.stderr
