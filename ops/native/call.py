"""Calls C++ functions with one struct of named fields; see call.h for their side of it.

A call is packed into bytes, which costs less than a ctypes structure of as many fields. Nothing in
memory says what these bytes mean, so a library's own declaration of them is compared with the one
here when it is loaded: a field that one side alone has, or has elsewhere, is an error that names
the library, not a pointer read as a size.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_hybrid.ops.native.build import BuildError, load_library

_KINDS = {"int64_t": "integer", "double": "number"}
_FIELD_BYTES = 8


class _Layout(ctypes.Structure):
    """Mirror of ``th::Layout``."""

    _fields_ = (
        ("fields", ctypes.c_char_p),
        ("bytes", ctypes.c_int64),
        ("row_fields", ctypes.c_char_p),
        ("row_bytes", ctypes.c_int64),
    )


def kernel(
    name: str,
    source: Path,
    *,
    tensors: str,
    integers: str,
    numbers: str = "",
    row_tensors: str = "",
    row_integers: str = "",
) -> Callable[..., bool]:
    """Wrap a C++ function that TH_EXPORT_CALL exports as one of Python.

    The wrapper takes the fields by position, which costs a tenth of what names do, in this order:

    - tensors: None is a null pointer; dense where no field is a stride of theirs;
    - integers, then numbers;
    - rows, if the function takes any: integers, one field after the other.

    It returns whether all indices were in range.

    Args:
        name: of the function.
        source: the C++ file, built and loaded (once) at the first call.
        tensors, integers, numbers: the names of the fields, in the order of their declaration.
        row_tensors, row_integers: names of the fields of the rows that follow a call, if any.

    Raises:
        BuildError: at the first call, when the source does not build or declares other fields.
    """
    fields = [*_named("tensor", tensors), *_named("integer", integers), *_named("number", numbers)]
    row_fields = [*_named("tensor", row_tensors), *_named("integer", row_integers)]

    def load_and_run(call: bytes) -> bool:
        scope["run"] = run = _load(name, source, fields, row_fields)
        return run(call)

    scope = {"pack": _packing(fields).pack, "pack_rows": _pack_rows, "run": load_and_run}
    # Compiled once, as namedtuple does it: one frame a call, and a count of fields that is held to.
    parameters = ", ".join(field for field, _ in fields)
    values = ", ".join(
        f"0 if {field} is None else {field}.data_ptr()" if kind == "tensor" else field
        for field, kind in fields
    )
    code = f"lambda {parameters}, /: run(pack({values}))"
    if row_fields:
        code = f"lambda {parameters}, /, *rows: run(pack({values}) + pack_rows(rows))"
    call: Callable[..., bool] = eval(code, scope)
    return call


def _named(kind: str, names: str) -> list[tuple[str, str]]:
    return [(name, kind) for name in names.split()]


def _packing(fields: Sequence[tuple[str, str]]) -> struct.Struct:
    return struct.Struct("=" + "".join("d" if kind == "number" else "q" for _, kind in fields))


def _pack_rows(values: Sequence[int]) -> bytes:
    return struct.pack(f"={len(values)}q", *values)


def declared_fields(name: str, source: Path) -> list[tuple[str, str]]:
    """List the fields that a function's struct declares: name and "tensor", "integer" or
    "number"."""
    return _declared(_layout(load_library(source.parent.name, source), name).fields.decode())


def _layout(library: ctypes.CDLL, name: str) -> _Layout:
    layout_of = _symbol(library, f"{name}_layout")
    layout_of.argtypes, layout_of.restype = [], ctypes.POINTER(_Layout)
    layout: _Layout = layout_of().contents
    return layout


def _load(
    name: str,
    source: Path,
    fields: Sequence[tuple[str, str]],
    row_fields: Sequence[tuple[str, str]],
) -> Callable[[bytes], bool]:
    library = load_library(source.parent.name, source)
    function, layout = _symbol(library, name), _layout(library, name)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_bool
    for ours, text, num_bytes in (
        (fields, layout.fields, layout.bytes),
        (row_fields, layout.row_fields, layout.row_bytes),
    ):
        theirs = _declared(text.decode())
        if theirs != list(ours) or num_bytes != _FIELD_BYTES * len(ours):
            raise BuildError(
                f"{name} of {library._name} is called with other fields than {source} declares: "
                f"{_differences(ours, theirs) or f'{num_bytes} bytes'}"
            )
    run: Callable[[bytes], bool] = function
    return run


def _symbol(library: ctypes.CDLL, name: str) -> Any:
    try:
        return library[name]
    except AttributeError as error:
        raise BuildError(f"{library._name} has no {name}: is it made by TH_EXPORT_CALL?") from error


def _declared(text: str) -> list[tuple[str, str]]:
    """List the fields of a C++ struct, such as ``const void *q, *k; int64_t n;``."""
    fields = []
    for statement in filter(None, map(str.strip, text.split(";"))):
        base = statement.split("*")[0].split(",")[0]
        shared = base if "*" in statement.split(",")[0] else base.rsplit(maxsplit=1)[0]
        for declarator in statement.split(","):
            name = re.findall(r"\w+", declarator)[-1]
            kind = "tensor" if "*" in declarator else _KINDS.get(shared.strip(), shared.strip())
            fields.append((name, kind))
    return fields


def _differences(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> str:
    """Describe the first field in which the two lists differ."""
    for number in range(max(len(ours), len(theirs))):
        given, wanted = (
            f"{fields[number][1]} {fields[number][0]}" if number < len(fields) else "nothing"
            for fields in (ours, theirs)
        )
        if given != wanted:
            return f"field {number} is {given} here, and {wanted} there"
    return ""
