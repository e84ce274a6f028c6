"""Checks of a machine before steps are compiled: C++ compiler, Python's headers, cache folder.

Inductor reports a missing one late, in a page of traceback. These checks report it in one line,
before anything is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.native.build import native_instructions

_NOTE = "torch_hybrid_instructions"  # file in Inductor's cache: CPU instructions of its code
_COMPILING = ("default", "fail_on_recompile")  # stances in which new graphs are compiled
_PROBE_BYTES = 1 << 20  # less free than this, and no step can be compiled


def make_cache_folder() -> None:
    """Make the folder of Inductor's cache, which torch makes when its compiler is imported.

    transformers imports the compiler when it loads a model. Called before that, this function
    reports a folder that cannot be made, so that no load error hides it.

    Raises:
        UnsupportedError: the folder cannot be made.
    """
    try:
        for folder in _cache_folders():
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UnsupportedError(_cache_refused(error)) from error


def missing_tools(device: torch.device) -> str | None:
    """Name the tool to install before steps can be compiled for ``device``; None if none is
    missing.

    On a CPU, Inductor writes C++ and calls a compiler. On CUDA, nothing is checked: Triton reports
    a missing compiler itself.
    """
    if device.type != "cpu" or sys.platform == "win32":
        return None
    make_cache_folder()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        looked = os.environ.get("CXX", "g++")
        return (
            f"no C++ compiler ({looked} does not run): install g++ (Debian, Ubuntu: "
            f"apt install g++), or name yours in CXX"
        )
    if sys.platform == "linux" and not _has_python_header():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"no Python.h in {sysconfig.get_path('include')}: install Python's headers "
            f"(Debian, Ubuntu: apt install python{version}-dev)"
        )
    return None


def switched_off_by() -> str | None:
    """Name the setting that switches torch.compile off for the process; None if there is none.

    Torch then runs a function as it is, and a step that has to be traced never is.
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # read by torch.compile at each call
        return "TORCHDYNAMO_DISABLE=1"
    from torch._dynamo import config
    from torch._dynamo.eval_frame import _stance

    if config.disable:
        is_set = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
        return "TORCH_COMPILE_DISABLE=1" if is_set else "torch._dynamo.config.disable"
    if _stance.stance not in _COMPILING:
        return f"torch.compiler.set_stance({_stance.stance!r})"
    return None


def check_toolchain(device: torch.device) -> None:
    """Refuse to compile for ``device`` if the machine cannot.

    Raises:
        UnsupportedError: a tool is missing, or the compile cache cannot be written.
    """
    if missing := missing_tools(device):
        raise UnsupportedError(f"compile=True cannot be: {missing}; compile=False runs uncompiled")
    check_cache()


def share_triton_cache(device: torch.device) -> None:
    """Let Triton keep all kernels of a GPU where Inductor keeps its own.

    Inductor sets the folder where it makes its first kernel: in this process if its cache has that,
    else in a worker. So kernels of a process that compiled would not be found by the next one.
    """
    if device.type != "cuda":
        return
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))


def check_cache() -> None:
    """Refuse a compile cache that cannot be written, or has no room.

    Raises:
        UnsupportedError: the cache is unusable; the error names its folder, the fault, and the
            setting of another folder.
    """
    make_cache_folder()
    check_cached_instructions()
    try:
        for folder in _cache_folders():
            with tempfile.TemporaryFile(dir=folder) as file:
                _write(file, bytes(_PROBE_BYTES))
    except OSError as error:
        raise UnsupportedError(_cache_refused(error)) from error


def check_cached_instructions() -> None:
    """Refuse a compile cache that another CPU has filled with instructions that this one lacks.

    Inductor compiles for the CPU that it runs on, but its cache is not keyed by it. So a file in
    the cache notes the instructions that its code may use.

    Raises:
        UnsupportedError: the cache may hold code that this CPU cannot run.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    here = native_instructions()
    if here is None:
        return
    note = Path(cache_dir(), _NOTE)
    try:
        cached = {*note.read_text(encoding="ascii").split()} if note.exists() else set()
        if lacking := cached - here:
            raise UnsupportedError(
                f"torch's compile cache {note.parent} may hold code for another CPU, with "
                f"{' '.join(sorted(lacking))}: name a folder for this kind of CPU in "
                f"TORCHINDUCTOR_CACHE_DIR"
            )
        if cached != here:
            note.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=note.parent) as folder:
                unit = Path(folder, note.name)
                unit.write_text(" ".join(sorted(here)), encoding="ascii")
                unit.replace(note)
    except OSError as error:
        raise UnsupportedError(_cache_refused(error)) from error


@contextmanager
def named_failures() -> Iterator[None]:
    """Say in one line what the machine lacks when a compilation fails for that reason.

    Raises:
        UnsupportedError: the cache or the disk is full, or the C++ compiler fails.
    """
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        yield
    except OSError as error:
        raise UnsupportedError(_cache_refused(error)) from error
    except BackendCompilerFailed as error:
        cause = error.inner_exception
        if isinstance(cause, OSError):
            raise UnsupportedError(_cache_refused(cause)) from error
        if isinstance(cause, InvalidCxxCompiler | CppCompileError | subprocess.SubprocessError):
            *_, last = str(cause).strip().splitlines()
            raise UnsupportedError(
                f"the C++ compiler failed: {last}; compile=False runs uncompiled"
            ) from error
        raise


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()


def _cache_folders() -> list[str]:
    """List the folders of Inductor's cache and of temporary files of the compilers it calls."""
    temporary = tempfile.gettempdir()
    return [os.environ.get("TORCHINDUCTOR_CACHE_DIR", temporary), temporary]


def _cache_refused(error: OSError) -> str:
    return (
        f"torch's compile cache cannot be written ({error}): make room, or name another folder "
        f"in TORCHINDUCTOR_CACHE_DIR, now {os.environ.get('TORCHINDUCTOR_CACHE_DIR', 'not set')}, "
        f"and in TMPDIR"
    )


def _has_python_header() -> bool:
    """Tell whether a C++ compiler finds Python.h, which Inductor's kernels include."""
    folders = [sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")]
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        folders += filter(None, os.environ.get(name, "").split(os.pathsep))
    return any(Path(folder, "Python.h").is_file() for folder in folders)
