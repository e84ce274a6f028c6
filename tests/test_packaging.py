"""What is in the tree is in the wheel: an editable install would hide a forgotten folder."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installed_wheel import KERNELS, install, run_without_compiler
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.native.build import HEADERS, name_prebuilt
from torch_hybrid.ops.native.targets import TARGETS, cpu_flags
from torch_hybrid.ops.native.wheel import make_wheel

ROOT = Path(__file__).parents[1]
BUILT = [HEADERS / "probe.cpp", ROOT / "ops/state_copy/_cpu.cpp"]  # the two that build fastest
SHIPPED = {".py", ".cpp", ".h", ".json", ".safetensors", ".typed", ".html"}
# Where each folder at the top goes in the package.
FOLDERS = {
    "torch_hybrid": "torch_hybrid",
    "ops": "torch_hybrid/ops",
    "graphs": "torch_hybrid/graphs",
}


def sources() -> Iterator[tuple[Path, str]]:
    """Every file that belongs in the package, and its path there."""
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and file.suffix in SHIPPED and not file.is_symlink():
                yield file, f"{package}/{file.relative_to(ROOT / folder).as_posix()}"


def modules() -> list[tuple[Path, str]]:
    """The Python files among them; other folders hold data of the package above."""
    return [(file, target) for file, target in sources() if file.suffix == ".py"]


def test_every_package_has_an_init():
    missing = {file.parent for file, _ in modules() if not (file.parent / "__init__.py").is_file()}
    assert not missing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools leaves its build folder beside the sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy)
    for file, _ in sources():
        target = copy / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    build = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_every_source(wheel: zipfile.ZipFile):
    shipped = set(wheel.namelist())
    assert {target for _, target in sources()} <= shipped


def test_the_wheel_has_nothing_else(wheel: zipfile.ZipFile):
    ours = {target for _, target in sources()}
    others = {
        name
        for name in wheel.namelist()
        if name not in ours and ".dist-info/" not in name and not name.endswith("README.md")
    }
    assert not others


def test_the_command_line_is_declared(wheel: zipfile.ZipFile):
    [name] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "torch-hybrid = torch_hybrid.cli:main" in wheel.read(name).decode()


@pytest.fixture(scope="module")
def platform_wheel(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two kernels; ``make wheel`` builds all."""
    if reason := compiler_missing():
        pytest.skip(reason)
    if platform.machine() != "x86_64" or not shutil.which("objdump"):
        pytest.skip("kernels are built for x86, and looked at by objdump")
    return make_wheel(Path(str(wheel.filename)), tmp_path_factory.mktemp("wheels"), BUILT)


def test_a_wheel_with_kernels_is_the_pure_one_and_they(
    wheel: zipfile.ZipFile, platform_wheel: Path
):
    assert platform_wheel.name == "torch_hybrid-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    made = zipfile.ZipFile(platform_wheel)
    others = set(made.namelist()) - set(wheel.namelist())
    of = {
        target: {f"{KERNELS}/{name_prebuilt(source, target.march)}" for source in BUILT}
        for target in TARGETS
    }
    # A target's kernel that is the next one's too is left out; the last target has all of its own.
    assert of[TARGETS[-1]] < others <= set.union(*of.values())
    [record] = [name for name in made.namelist() if name.endswith("RECORD")]
    assert all(f"{name},sha256=" in made.read(record).decode() for name in others)
    tags = made.read(record.replace("RECORD", "WHEEL")).decode()
    assert "Tag: py3-none-manylinux_2_28_x86_64\n" in tags
    assert "Root-Is-Purelib: false\n" in tags


RUN_KERNEL = """
import torch
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.native.build import PREBUILT, loaded_libraries
from torch_hybrid.ops.state_copy import state_copy
assert compiler_missing() is None, compiler_missing()
pool = torch.arange(12.0).reshape(4, 3).clone()
state_copy([pool], *torch.tensor([[1], [3]], dtype=torch.int32), dim=0, impl="cpp")
assert pool[3].tolist() == [3.0, 4.0, 5.0], pool
print(*sorted(file.relative_to(PREBUILT).name for file in loaded_libraries().values()))
"""


@pytest.mark.skipif("avx2" not in cpu_flags(), reason="kernels come built for CPUs with AVX2")
def test_an_installed_wheel_needs_no_compiler(platform_wheel: Path, tmp_path: Path):
    python, cache = install(platform_wheel, tmp_path / "env"), tmp_path / "cache"
    ran = run_without_compiler(python, cache, "-c", RUN_KERNEL)
    assert re.fullmatch(r"nativeprobe-\w+\.so state_copy_cpu-\w+\.so\n", ran)
