"""Run Triton kernels on a CPU: in a process of their own, which interprets them.

``TRITON_INTERPRET`` is read when a kernel's module is imported, and then holds for the process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_hybrid.ops.triton.devices import triton_missing

INTERPRETED = "passed in the interpreter"
needs_triton = pytest.mark.skipif(triton_missing() is not None, reason=triton_missing() or "")
needs_interpreter = pytest.mark.interpreter

# A line in is a folder and a selection (pytest's -k), a line out the exit status and the output.
SERVER = """
import contextlib, io, json, sys
import pytest

for line in sys.stdin:
    folder, selection = json.loads(line)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main(["-p", "no:cacheprovider", "-k", selection, folder])
    print(json.dumps([status, output.getvalue()]), flush=True)
"""


class Interpreter:
    """A process that interprets kernels, and runs tests one selection after the other."""

    def __init__(self, process: subprocess.Popen[str], errors: Any) -> None:
        self._process, self._errors = process, errors

    def run(
        self, record_property: Callable[[str, object], None], folder: Path, selection: str
    ) -> None:
        """Run the tests of ``folder`` that ``selection`` (pytest's -k) picks; all must pass.

        How many they are is recorded: the summary of the whole run counts them.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), selection]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process died: {self._stderr()}"
        status, output = json.loads(answer)
        summary = output.strip().rpartition("\n")[2]
        assert status == 0, output + self._stderr()
        passed = re.match(r"(\d+) passed", summary)
        assert passed is not None, summary
        record_property(INTERPRETED, int(passed[1]))
        assert "skipped" not in summary, summary

    def _stderr(self) -> str:
        self._errors.seek(0)
        return str(self._errors.read())


@contextmanager
def interpreter_process() -> Iterator[Interpreter]:
    """One process for all: importing torch and transformers takes longer than most tests do."""
    # Options of the run that this is part of are not for it: its last lines are read here.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=env | {"TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            yield Interpreter(process, errors)


def interprets(contract: str) -> Callable[..., None]:
    """Make the test that runs there what ``contract`` (pytest's -k) picks of the folder in which
    the test stands."""

    @needs_triton
    def test(
        interpreter: Interpreter,
        record_property: Callable[[str, object], None],
        request: pytest.FixtureRequest,
    ) -> None:
        interpreter.run(record_property, request.path.parent, " ".join(contract.split()))

    return test


def round_products_once(patch: pytest.MonkeyPatch) -> None:
    """Sum products of float32 in float64, and round their sum.

    numpy's library adds up in an order that goes by the CPU and by how many rows there are, of
    which a kernel knows nothing: so a row would have other bits in another tile.
    """
    multiply = np.matmul

    def multiply_exactly(a: Any, b: Any, dtype: Any = None) -> Any:
        if dtype != np.float32:
            return multiply(a, b, dtype=dtype)
        return multiply(a, b, dtype=np.float64).astype(np.float32)

    patch.setattr(np, "matmul", multiply_exactly)


def make_faster(patch: pytest.MonkeyPatch) -> None:
    """Leave out what the interpreter does again and again, and what nobody looks at.

    Every value and every check stays.
    """
    _patch_language_once_a_launch(patch)
    _make_types_once(patch)
    _check_no_overflow_in_vain(patch)


def _check_no_overflow_in_vain(patch: pytest.MonkeyPatch) -> None:
    """A sum of integers is made anew in 64 bits, to be asserted, and nothing is asserted without
    ``debug``."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _make_types_once(patch: pytest.MonkeyPatch) -> None:
    """Shapes are checked, wrapped and written out at the first value of each shape.

    A value and its type are made at every operation; but for the handle and the element's type,
    those of one shape have the same attributes, which nobody changes.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    numpy_dtype = interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        self.__dict__.update(types[key], element_ty=element_ty)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = {name: vars(self)[name] for name in ("shape", "numel")}
        self.__dict__.update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    def numpy_dtype_once(dtype: Any) -> Any:
        key = str(dtype.scalar)
        if key not in dtypes:
            dtypes[key] = numpy_dtype(dtype)
        return dtypes[key]

    patch.setattr(tl.block_type, "__init__", type_init)
    patch.setattr(tl.tensor, "__init__", tensor_init)
    patch.setattr(interpreter, "_get_np_dtype", numpy_dtype_once)


def _patch_language_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter put its functions in the place of Triton's once for each launch.

    It does so at every call of a device function, of which ``tl.zeros`` and ``tl.sum`` are some,
    and looks at all names of three modules: that takes longer than what most of them do. What it
    puts there depends on the modules that a function sees and on nothing else.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules: dict[Any, frozenset[str]] = {}
    patched: set[frozenset[str]] = set()

    def seen_by(fn: Any) -> frozenset[str]:
        if fn not in modules:
            names = {tl: "language", tl.core: "core"}
            seen = (value for value in fn.__globals__.values() if value is tl or value is tl.core)
            modules[fn] = frozenset(names[module] for module in seen)
        return modules[fn]

    def patch_once(fn: Any) -> Any:
        if seen_by(fn) in patched:
            return None  # what a device function's call makes of it: nothing
        patched.add(seen_by(fn))
        return patch_language(fn)

    def launch_anew(*args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(*args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
