"""Kernels that came built: taken for what this CPU has and these sources, and for nothing else."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ops.native.test_build import ANSWER, cache_folder, libraries  # noqa: F401
from torch_hybrid.ops.native import BuildError, build, compiler_missing, load_library, targets
from torch_hybrid.ops.native.targets import TARGETS

pytestmark = [
    pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing())),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="targets are of x86"),
    pytest.mark.usefixtures("cache_folder"),
]
FLAGS = [" ".join(sorted(target.needs)) for target in TARGETS]
# Which of the targets a library was built for.
WIDTH = """
#if defined(__AMX_BF16__)
#define TARGET 0
#elif defined(__AVX512F__)
#define TARGET 1
#else
#define TARGET 2
#endif
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel that is there for all targets, in a package without a compiler."""
    source, folder = tmp_path / "answer.cpp", tmp_path / "prebuilt"
    source.write_text(WIDTH + ANSWER.format("TARGET"))
    folder.mkdir()
    monkeypatch.setattr(build, "PREBUILT", folder)
    for target in TARGETS:
        build.build_for(target.march, source, folder / build.name_prebuilt(source, target.march))
    return source


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def become(flags: str) -> None:
        monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset(flags.split()))

    return become


def answer(source: Path) -> int:
    load_library.cache_clear()
    return load_library("answer", source).answer()


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.parametrize("best", range(len(TARGETS)))
def test_the_best_that_the_cpu_has_is_taken(
    best: int,
    source: Path,
    cache_folder: Path,  # noqa: F811
    on_cpu: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where there is a compiler: it would take seconds for each kernel."""
    on_cpu(FLAGS[best])
    assert answer(source) == best
    without_compiler(monkeypatch)
    assert answer(source) == best
    assert libraries(cache_folder) == []


def test_an_edited_source_is_built_here(
    source: Path,
    cache_folder: Path,  # noqa: F811
    on_cpu: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu(FLAGS[-1])
    source.write_text(ANSWER.format(42))
    assert answer(source) == 42
    assert len(libraries(cache_folder)) == 1
    source.write_text(ANSWER.format(43))
    without_compiler(monkeypatch)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler was found"):
        answer(source)


def test_a_changed_header_counts_as_an_edited_source(
    source: Path,
    cache_folder: Path,  # noqa: F811
    on_cpu: Callable[[str], None],
) -> None:
    on_cpu(FLAGS[-1])
    (source.parent / "value.h").write_text("// none when the libraries were built\n")
    answer(source)
    assert len(libraries(cache_folder)) == 1


def test_chosen_instructions_are_taken_of_what_came_or_built_here(
    source: Path,
    cache_folder: Path,  # noqa: F811
    on_cpu: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu(FLAGS[0])
    monkeypatch.setenv(build.MARCH, "x86-64-v3")
    assert answer(source) == 2
    assert libraries(cache_folder) == []
    for number, march in enumerate(("native", "x86-64-v2"), start=1):
        monkeypatch.setenv(build.MARCH, march)
        answer(source)
        assert len(libraries(cache_folder)) == number


def test_a_cpu_that_is_too_old_builds_or_says_what_it_lacks(
    source: Path,
    cache_folder: Path,  # noqa: F811
    on_cpu: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu(" ".join(TARGETS[-1].needs - {"avx2", "fma"}))
    answer(source)
    assert len(libraries(cache_folder)) == 1
    without_compiler(monkeypatch)
    assert compiler_missing() == (
        "no C++ compiler was found (looked for $CXX, g++, c++, clang++), and kernels that came "
        "built need what this CPU lacks: avx2 fma"
    )
