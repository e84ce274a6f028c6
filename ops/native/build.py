"""Builds the C++ kernels of this package: one translation unit per op family, cached by content.

A kernel has a C interface and includes no torch header: it compiles in seconds.
It uses OpenMP, and must share torch's own runtime: two OpenMP runtimes in a process keep two
thread pools that fight over the same cores. So ``-fopenmp`` is given to the compiler but not to
the linker, and the ``GOMP_*`` symbols resolve against the library that torch has loaded.
clang's kernels call libomp instead, which torch has on macOS. On Linux they load only where
LD_PRELOAD names that library: it then serves torch as well.
A wheel for one platform brings kernels that are built already (wheel.py), for the kinds of CPU of
targets.py: they are taken as long as they were built from the sources that lie here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch  # noqa: F401  (loads the OpenMP runtime that the kernels resolve against)

from torch_hybrid.ops.native.targets import lacking, targets_here

HEADERS = Path(__file__).parent
PREBUILT = HEADERS / "prebuilt"  # libraries by key; a source tree and a pure wheel have none
COMPILERS = ("g++", "c++", "clang++")
_IS_MACOS = sys.platform == "darwin"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    *(["-Xclang"] if _IS_MACOS else []),  # Apple's driver refuses what its compiler takes
    "-fopenmp",
    "-Wno-psabi",
    # What is fused is written down (fma in halves.h): where a compiler may choose, a row has other
    # bits in another loop, and so in another batch.
    "-ffp-contract=off",
)
# Apple's linker has to be told that a symbol may be torch's.
LINKED = ("-shared", *(["-undefined", "dynamic_lookup"] if _IS_MACOS else []))
LIBRARY = "-lc++" if _IS_MACOS else "-lstdc++"  # which CXX=gcc, as some set it, would not link
# Which instructions kernels may use, as the compiler's -march takes it: "x86-64-v3" is AVX2 alone.
# By default all that this CPU has, as far as kernels that came built make use of it; "native" is
# built here.
MARCH = "TORCH_HYBRID_MARCH"
# Of a build whose every access is checked: SANITIZE names what gcc's -fsanitize takes. The runtime
# comes first in a process or not at all, so python runs with it preloaded; see `make sanitize`.
# What is fused is written down, so -O1 computes the same, and is built in a third of the time.
SANITIZE = "TORCH_HYBRID_SANITIZE"
SANITIZER_FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
SHOWN_LINES = 20
# The compilers' macros that name sets of instructions, of x86 and of Arm.
_INSTRUCTIONS = re.compile(
    r"^#define __((?:AMX|AVX|BMI|F16C|FMA|GFNI|LZCNT|MOVBE|POPCNT|SHA|SSE|VAES|VPCLMUL|XSAVE)\w*?"
    r"|ARM_FEATURE_\w+?)(?:__)? ",
    re.MULTILINE,
)
_OPENMP = "libgomp.so.1"
_NO_LIBOMP = "clang's OpenMP is not torch's: install g++, or name libomp.so in LD_PRELOAD"
_OTHER_FOLDER = "set TORCH_HYBRID_CACHE to a writable folder"
_PATIENCE = 30.0  # seconds, of which a build takes up to twelve


class BuildError(RuntimeError):
    """A kernel could not be built or loaded; the message shows the command and its last lines."""


@cache
def load_library(name: str, source: Path) -> ctypes.CDLL:
    """Build ``source`` unless the cache has it, and load it.

    Args:
        name: a name for the built file; the kernel's identity is the hash of its content.
        source: the C++ file; it may include headers of its own folder and of ``ops/native``.

    Returns:
        The library. Its functions take raw pointers, sizes and a thread count.

    Raises:
        BuildError: there is no compiler, it failed, or the result does not load.
    """
    library = library_of(name, source)
    _show_openmp()
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        hint = f"; {_NO_LIBOMP}" if "__kmpc" in str(error) else ""
        raise BuildError(f"{library} does not load: {error}{hint}") from error
    _LOADED[key_of_source(name, source)] = library
    return loaded


@cache
def _show_openmp() -> None:
    """Make the OpenMP runtime of torch visible to kernels: on Arm, torch loads it for itself."""
    if sys.platform == "linux":
        with suppress(OSError):  # it has another name: the probe tells
            ctypes.CDLL(_OPENMP, mode=os.RTLD_NOLOAD | os.RTLD_NOW | os.RTLD_GLOBAL)


def library_of(name: str, source: Path) -> Path:
    """Find the file that ``load_library`` loads, and build it unless the cache or an artefact has
    it.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    return _brought(name, source) or _built(name, source)


def is_there(name: str, source: Path) -> bool:
    """Tell whether ``library_of`` has nothing to build, or no compiler to build with."""
    compiler = _find_compiler()
    return (
        compiler is None or bool(_brought(name, source)) or _path(compiler, name, source).exists()
    )


def _path(compiler: str, name: str, source: Path) -> Path:
    """Name the cache's file for a source and compiler."""
    return cache_folder() / f"{name}-{_content_hash(compiler, source)}.so"


def _brought(name: str, source: Path) -> Path | None:
    """Find the library of ``source`` that an artefact or the wheel brought, if any."""
    brought = _BROUGHT.get(key_of_source(name, source)) if _BROUGHT else None
    return brought or _prebuilt(source)


def _prebuilt(source: Path) -> Path | None:
    """Find the library of ``source`` that came with the package, if it has one for this CPU."""
    if not PREBUILT.is_dir():
        return None
    marches = (target.march for target in targets_here(os.environ.get(MARCH)))
    files = (PREBUILT / name_prebuilt(source, march) for march in marches)
    return next((file for file in files if file.is_file()), None)


def name_prebuilt(source: Path, march: str) -> str:
    """Name the file in ``PREBUILT`` of a source for a kind of CPU."""
    return f"{source.parent.name}{source.stem}-{_hash_of_source(source, march)}.so"


def key_of_source(name: str, source: Path) -> str:
    """Identify a library by what it is built from, without the compiler and the CPU."""
    return f"{name}-{_hash_of_source(source)}"


def _built(name: str, source: Path) -> Path:
    """Find the library of ``source`` in the cache, or build it."""
    compiler = _find_compiler()
    if compiler is None:
        raise BuildError(_no_compiler())
    _check_march(compiler)
    library = _path(compiler, name, source)
    if not library.exists():
        try:
            library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _in_turn(library):
                if not library.exists():
                    _build(compiler, source, library)
        except OSError as error:
            raise BuildError(f"cannot write {library}: {error}; {_OTHER_FOLDER}") from error
    return library


# Libraries by what they were built from, whatever compiler it was: those of this process, and
# those that came from elsewhere to be taken instead of building.
_LOADED: dict[str, Path] = {}
_BROUGHT: dict[str, Path] = {}


def loaded_libraries() -> dict[str, Path]:
    """List the files of all libraries loaded in this process, as ``bring_libraries`` takes them."""
    return dict(_LOADED)


def bring_libraries(libraries: Mapping[str, Path]) -> None:
    """Take these libraries where their sources are asked for, instead of building them.

    They were built for this CPU, of sources and flags that are the same here.
    """
    _BROUGHT.update(libraries)
    compiler_missing.cache_clear()


def unpack_library(data: bytes) -> Path:
    """Write a library's content to a file in the cache, from which it can be loaded.

    Raises:
        BuildError: the cache cannot be written.
    """
    library = cache_folder() / f"{hashlib.sha256(data).hexdigest()[:20]}.so"
    try:
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                Path(folder, "unpacked.so").write_bytes(data)
                Path(folder, "unpacked.so").replace(library)
    except OSError as error:
        raise BuildError(f"cannot write {library}: {error}; {_OTHER_FOLDER}") from error
    return library


@cache
def compiler_missing() -> str | None:
    """Say why kernels cannot be built on this machine; None when they can.

    A probe is built, loaded and run, once per machine: a compiler may be there and still not serve.
    It may lack a standard library, use an OpenMP other than torch's, or the home may be read-only.
    """
    source = HEADERS / "probe.cpp"
    if _find_compiler() is None and _brought("probe", source) is None:
        return _no_compiler()
    try:
        probe = load_library("probe", source)
    except BuildError as error:
        return f"the C++ compiler cannot build kernels: {error}"
    return None if probe.th_probe(2) >= 1 else "OpenMP does not run in a built kernel"


def cache_folder() -> Path:
    """Name the folder of built kernels: ``TORCH_HYBRID_CACHE``, else one in the user's cache."""
    if chosen := os.environ.get("TORCH_HYBRID_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_hybrid"


def _candidates() -> list[str]:
    chosen = os.environ.get("CXX")
    return [chosen, *COMPILERS] if chosen else list(COMPILERS)


def _find_compiler() -> str | None:
    return next((path for name in _candidates() if (path := shutil.which(name))), None)


def _no_compiler() -> str:
    reason = f"no C++ compiler was found (looked for $CXX, {', '.join(COMPILERS)})"
    if PREBUILT.is_dir() and (lacks := lacking()):
        return f"{reason}, and kernels that came built need what this CPU lacks: {_listed(lacks)}"
    return reason


def _listed(names: Iterable[str]) -> str:
    return " ".join(sorted(names))


def _flags(march: str | None = None) -> list[str]:
    flags = [*FLAGS, *_march_flags(march or os.environ.get(MARCH) or "native")]
    checks = os.environ.get(SANITIZE)
    return [*flags, *SANITIZER_FLAGS, f"-fsanitize={checks}"] if checks else flags


def _march_flags(march: str) -> list[str]:
    """Split options that choose instructions: others may follow a -march (targets.py)."""
    return f"-march={march}".split()


def _target(compiler: str) -> str:
    """List the predefined macros, which name the compiler's version and the instruction sets."""
    return _macros(compiler, *_flags())


def native_instructions() -> frozenset[str] | None:
    """List the instruction sets that the compiler uses for this CPU; None without a compiler that
    runs."""
    compiler = _find_compiler()
    try:
        return None if compiler is None else _instructions(compiler, "native")
    except BuildError:
        return None


def _check_march(compiler: str) -> None:
    """Refuse instructions that this CPU does not have: to run them ends the process."""
    march = os.environ.get(MARCH)
    if not march:
        return
    if lacks := _instructions(compiler, march) - _instructions(compiler, "native"):
        raise BuildError(f"{MARCH}={march} has what this CPU lacks: {_listed(lacks)}")


def _instructions(compiler: str, march: str) -> frozenset[str]:
    return frozenset(_INSTRUCTIONS.findall(_macros(compiler, *_march_flags(march))))


@cache
def _macros(*command: str) -> str:
    return _run([*command, "-dM", "-E", "-x", "c++", os.devnull])


def _content_hash(compiler: str, source: Path) -> str:
    built_by = " ".join([compiler, _target(compiler), _hash_of_source(source)])
    return hashlib.sha256(built_by.encode()).hexdigest()[:20]


def _hash_of_source(source: Path, march: str | None = None) -> str:
    """Hash all that a library is built from but the compiler and the CPU."""
    headers = sorted({*HEADERS.glob("*.h"), *source.parent.glob("*.h")})
    digest = hashlib.sha256(" ".join(_flags(march)).encode())
    for file in (source, *headers):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


@contextmanager
def _in_turn(library: Path) -> Iterator[None]:
    """Hold a lock, so that processes that need one library at once (ranks, say) build it once.

    The wait is bounded, since the builder may have been stopped. Where the file system has no locks
    there is none: ``_build`` is safe without.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(library.with_suffix(".lock"), timeout=_PATIENCE)
    with suppress(Timeout, NotImplementedError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def build_for(march: str, source: Path, library: Path) -> None:
    """Build ``source`` to a file for any CPU that the compiler knows, as -march names it.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    compiler = _find_compiler()
    if compiler is None:
        raise BuildError(_no_compiler())
    _build(compiler, source, library, march)


def _build(compiler: str, source: Path, library: Path, march: str | None = None) -> None:
    """Build beside the target and rename, so that processes building at once do not clash."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unit, built = Path(folder, "unit.o"), Path(folder, "unit.so")
        _run([compiler, *_flags(march), f"-I{HEADERS}", "-c", str(source), "-o", str(unit)])
        checked = [flag for flag in _flags(march) if flag.startswith("-fsanitize=")]
        _run([compiler, *checked, *LINKED, str(unit), LIBRARY, "-o", str(built)])
        built.replace(library)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = "\n".join(done.stderr.splitlines()[-SHOWN_LINES:])
        raise BuildError(f"{' '.join(command)}\nexited with {done.returncode}:\n{shown}")
    return done.stdout
