"""Libraries of a wheel for one platform: each asks no more of a system than that platform has."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from torch_hybrid.ops.native import BuildError, build, compiler_missing
from torch_hybrid.ops.native.wheel import check_library

MISSING = [tool for tool in ("g++", "nm", "objdump") if not shutil.which(tool)]
pytestmark = [
    pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing())),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="targets are of x86"),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}"),
]


EXPORT = 'extern "C" __attribute__((visibility("default")))'


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "kernel.so"


def build_kernel(body: str, library: Path) -> None:
    source = library.with_suffix(".cpp")
    source.write_text(body)
    build.build_for("x86-64-v3", source, library)


def test_a_kernel_may_call_the_openmp_of_torch(library: Path) -> None:
    build_kernel("void g(); void f() {\n#pragma omp parallel\n  g(); }\nvoid g() {}\n", library)
    check_library(library)


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (f"#include <cmath>\n{EXPORT} double f(double x) {{ return std::exp(x); }}", "GLIBC_2.29"),
        (f'extern "C" void Py_Finalize();\n{EXPORT} void f() {{ Py_Finalize(); }}', "Py_Finalize"),
    ],
)
def test_what_not_every_machine_of_the_platform_has(body: str, asked: str, library: Path) -> None:
    build_kernel(f"{body}\n", library)
    with pytest.raises(BuildError, match=rf"more than manylinux_2_28\S+ has: \['{asked}'\]"):
        check_library(library)


def test_an_openmp_of_its_own(library: Path) -> None:
    build_kernel("void f() {}\n", library)
    source = str(library.with_suffix(".cpp"))
    link = ["g++", "-shared", "-Wl,--no-as-needed", "-lgomp", source, "-o", str(library)]
    subprocess.run(link, check=True)
    with pytest.raises(BuildError, match=r"\['libgomp.so.1'\]"):
        check_library(library)
