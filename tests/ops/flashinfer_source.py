"""FlashInfer as it is installed, read without importing it: importing takes seconds and a GPU."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from torch_hybrid.ops.flashinfer.library import flashinfer_missing

_MISSING = flashinfer_missing()()
needs_flashinfer = pytest.mark.skipif(_MISSING is not None, reason=_MISSING or "it is installed")


def parameters_of(file: str, function: str) -> list[str]:
    """The names of what ``function`` of one of its files takes, in order.

    ``outer.inner`` for one that is defined within another.
    """
    scope: list[ast.stmt] = ast.parse(source_of(file)).body
    for name in function.split("."):
        found = [n for n in scope if isinstance(n, ast.FunctionDef) and n.name == name]
        scope = found[-1].body  # the last definition: those before are overloads
    arguments = found[-1].args
    return [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]


def native_parameters_of(file: str, function: str) -> list[str]:
    """The names of what a C++ function of one of its sources takes, in order.

    Those that a macro adds are left out.
    """
    found = re.search(rf"{function}\(([^;{{]*?)\)\s*{{", source_of(f"data/csrc/{file}"))
    assert found is not None
    plain = re.sub(r"ADDITIONAL_FUNC_PARAMS|=[^,]*", "", found[1])
    return [parameter.split()[-1] for parameter in plain.split(",")]


def source_of(file: str) -> str:
    """The text of one of its files."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / file).read_text()
