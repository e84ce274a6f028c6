"""What C++ is called with: two declarations of one struct, compared when a library is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_hybrid.ops.native import BuildError, compiler_missing
from torch_hybrid.ops.native.call import _declared, kernel

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))
OPS = Path(importlib.import_module("torch_hybrid.ops").__file__ or "").parent
SOURCE = """
#include "call.h"
TH_CALL(Call, const float *x, *y; {integers}; double scale;);
TH_CALL(Row, const float* z; int64_t size;);
TH_EXPORT_CALL_OF_ROWS(add, Call, Row) {{
  float sum = float(call->scale) * *call->x + (call->y ? *call->y : 0.0f);
  for (int64_t i = 0; i < call->num_rows; ++i)
    for (int64_t j = 0; j < th::rows_of<Row>(*call)[i].size; ++j)
      sum += th::rows_of<Row>(*call)[i].z[j];
  const_cast<float*>(call->x)[0] = sum;
  return sum < 100;
}}
"""
FIELDS = {
    "tensors": "x y",
    "integers": "num_rows num_threads",
    "numbers": "scale",
    "row_tensors": "z",
    "row_integers": "size",
}


@pytest.fixture
def bind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., bool]]:
    """A kernel whose C++ side declares ``integers``, and whose Python side ``changes``."""
    monkeypatch.setenv("TORCH_HYBRID_CACHE", str(tmp_path / "cache"))

    def bind(integers: str = "int64_t num_rows, num_threads", **changes: str):
        source = tmp_path / "add.cpp"
        source.write_text(SOURCE.format(integers=integers))
        return kernel("add", source, **{**FIELDS, **changes})

    return bind


def test_fields_and_rows_arrive(bind):
    add, x, y, z = bind(), torch.ones(1), torch.ones(1), torch.ones(4)
    assert add(x, y, 2, 1, 3.0, z.data_ptr(), 4, y.data_ptr(), 1)
    assert x.item() == 3 + 1 + 4 + 1
    assert add(x, None, 0, 1, 2.0)
    assert x.item() == 18
    assert not add(x, None, 0, 1, 10.0)


def test_a_field_too_few_is_a_type_error(bind):
    with pytest.raises(TypeError, match="scale"):
        bind()(torch.ones(1), None, 0, 1)


@pytest.mark.parametrize(
    ("integers", "changes", "difference"),
    [
        ("int64_t num_rows, num_threads, added", {}, "integer added there"),
        ("int64_t num_rows", {}, "integer num_threads here"),
        ("int64_t num_threads, num_rows", {}, "integer num_rows here, and integer num_threads"),
        ("int64_t num_rows; int32_t num_threads", {}, "int32_t num_threads there"),
        ("int64_t num_rows, num_threads", {"numbers": "scale added"}, "number added here"),
        ("int64_t num_rows, num_threads", {"tensors": "x"}, "tensor y there"),
        ("int64_t num_rows, num_threads", {"row_tensors": ""}, "tensor z there"),
    ],
)
def test_another_layout_is_refused_when_it_is_loaded(bind, integers, changes, difference):
    add = bind(integers, **changes)
    with pytest.raises(BuildError, match=difference) as error:
        add(*_nothing({**FIELDS, **changes}))
    assert "add.cpp" in str(error.value)


def _nothing(fields: dict[str, str]) -> list[int | None]:
    num_others = len(fields["integers"].split()) + len(fields["numbers"].split())
    return [None] * len(fields["tensors"].split()) + [0] * num_others


def test_a_function_of_another_making_is_refused(tmp_path):
    source = tmp_path / "plain.cpp"
    source.write_text('#include "simd.h"\nextern "C" TH_EXPORT bool plain() { return true; }\n')
    with pytest.raises(BuildError, match="no plain_layout"):
        kernel("plain", source, tensors="x", integers="")(None)


def test_declarations_are_read_as_cpp_does():
    text = "const void *q, *k; float* state; int64_t a, b; const bool * flag; double c; float d;"
    assert _declared(text) == [
        ("q", "tensor"),
        ("k", "tensor"),
        ("state", "tensor"),
        ("a", "integer"),
        ("b", "integer"),
        ("flag", "tensor"),
        ("c", "number"),
        ("d", "float"),
    ]


def test_no_other_module_calls_a_library():
    """One idiom: whoever loads a library, or packs a struct, goes through ``kernel``."""
    for file in OPS.rglob("*.py"):
        if file.parent.name != "native":
            code = file.read_text()
            assert "ctypes" not in code, file
            assert "import struct" not in code, file
