"""What is in the tree is in the wheel: an editable install would hide a forgotten folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = {".py", ".cpp", ".h", ".json", ".safetensors", ".typed"}
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


def test_the_package_list_is_the_tree():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tree = {target.rpartition("/")[0].replace("/", ".") for _, target in modules()}
    listed = settings["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == tree


def test_every_package_has_an_init():
    missing = {file.parent for file, _ in modules() if not (file.parent / "__init__.py").is_file()}
    assert not missing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools leaves its build folder beside the sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
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
