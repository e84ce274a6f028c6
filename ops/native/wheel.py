"""Makes a wheel for one platform of the pure one: the same files, and built kernels for targets.py.

    python -m torch_hybrid.ops.native.wheel PURE.whl FOLDER

g++ builds them with the flags of a machine's own build. Kernels call little of the C library, all
of it old, so a container with an old one has nothing to add: what each library asks of a system is
checked. It brings no OpenMP of its own (clang would call another one than torch's). It calls
neither torch nor Python, so it serves the same versions as the pure wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from torch_hybrid.ops.native.build import HEADERS, PREBUILT, BuildError, build_for, name_prebuilt
from torch_hybrid.ops.native.targets import TARGETS

PLATFORM = "manylinux_2_28_x86_64"
# What that platform has: the newest version of each set of symbols, and libraries.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
OPENMP = ("GOMP_", "omp_")  # calls of the runtime that torch has loaded; no others are left open


def sources() -> list[Path]:
    """List the C++ files of all ops, and of what measures and chooses among them."""
    return sorted(HEADERS.parent.rglob("*.cpp"))


def make_wheel(pure: Path, folder: Path, sources: Sequence[Path]) -> Path:
    """Write a wheel of what is in ``pure``, and of built kernels, to a folder.

    Args:
        pure: the wheel of this source tree.
        folder: where the new one is written, which is made.
        sources: the C++ files to build.

    Returns:
        The wheel.

    Raises:
        BuildError: a kernel does not build, or would not load on every machine of the platform.
    """
    with TemporaryDirectory() as unpacked:
        _wheel("unpack", str(pure), "--dest", unpacked)
        [content] = Path(unpacked).iterdir()
        kernels = content / "torch_hybrid" / PREBUILT.relative_to(HEADERS.parents[1])
        kernels.mkdir()
        for library in _built(sources, kernels):
            check_library(library)
        drop_twins(sources, kernels)
        [tags] = content.glob("*.dist-info/WHEEL")
        text = tags.read_text(encoding="utf-8")
        text = text.replace("Tag: py3-none-any", f"Tag: py3-none-{PLATFORM}")
        text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        tags.write_text(text, encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        _wheel("pack", str(content), "--dest-dir", str(folder))
    version = pure.name.split("-")[1]
    return folder / f"torch_hybrid-{version}-py3-none-{PLATFORM}.whl"


def drop_twins(sources: Sequence[Path], folder: Path) -> None:
    """Remove libraries that equal those of the next target, which a machine takes then."""
    for source in sources:
        for file, other in pairwise(folder / name_prebuilt(source, x.march) for x in TARGETS):
            if file.read_bytes() == other.read_bytes():
                file.unlink()


def check_library(library: Path) -> None:
    """Refuse a library that asks more of a system than the platform has.

    Raises:
        BuildError: names what it asks for.
    """
    headers, undefined = _printed("objdump", "-p", library), _printed("nm", "-D", "-u", library)
    asked = {*re.findall(r"NEEDED +(\S+)", headers)} - LIBRARIES
    for name, version in re.findall(r"0x\w+ 0x\w+ \d+ ([A-Z]+)_([\d.]+)", headers):
        if tuple(map(int, version.split("."))) > NEWEST.get(name, ()):
            asked.add(f"{name}_{version}")
    unversioned = re.findall(r" U (\w+)$", undefined, re.MULTILINE)
    asked |= {name for name in unversioned if not name.startswith(OPENMP)}
    if asked:
        raise BuildError(f"{library.name} needs more than {PLATFORM} has: {sorted(asked)}")


def _built(sources: Sequence[Path], folder: Path) -> Iterator[Path]:
    """Build the libraries of these sources for all targets, side by side."""

    def build(source: Path, march: str) -> Path:
        library = folder / name_prebuilt(source, march)
        build_for(march, source, library)
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
        return library

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = [(source, target.march) for source in sources for target in TARGETS]
        yield from pool.map(build, *zip(*pairs, strict=True))


def _printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _wheel(*arguments: str) -> None:
    command = [sys.executable, "-m", "wheel", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Make the wheel that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pure", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    wheel = make_wheel(options.pure, options.folder, sources())
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
