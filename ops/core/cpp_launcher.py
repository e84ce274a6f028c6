"""Launchers of C++ kernels, whose arguments are an op's fields by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_hybrid.ops.core.declaration import Declaration, compile_function
from torch_hybrid.ops.core.kinds import Returns
from torch_hybrid.ops.native import cpu_tuning
from torch_hybrid.ops.native.call import declared_fields, kernel

_CPP_SIZES = ("T=num_tokens", "N=num_seqs", "S=num_slots", "P=num_pages", "M=max_pages")


@dataclass(frozen=True, slots=True)
class Cpp:
    """Names that the struct of a C++ kernel has for what the op calls otherwise.

    Attributes:
        sizes: letters, or expressions of them without blanks: ``"D//2=half_dim"``. T, N, S, P and M
            are ``num_tokens``, ``num_seqs``, ``num_slots``, ``num_pages`` and ``max_pages``.
        values: expressions of ``x``, an instance of the op's class, by name.
    """

    sizes: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


def load_cpp(
    declaration: Declaration, returns: Returns[Any], cpp: Cpp, source: Path
) -> Callable[..., Any]:
    """Build a C++ kernel and make its launcher, of the fields that the kernel's struct declares.

    Tensors are the op's, then results. Doubles are options and values. Integers are

    - sizes and values that ``cpp`` names, options and properties of the op;
    - ``<field>_stride``, ``<field>_token`` or ``<field>_row``, the first stride of rows, and
      ``<field>_head`` or ``<field>_head_stride``, the second;
    - ``wide_<field>``, whether it is float32, ``is_bf16``, ``num_threads``, ``state_streams``;
    - ``is_invariant``, an option of the launcher.
    """
    fields = declared_fields(declaration.name, source)
    tensors, integers, numbers = (
        [name for name, kind in fields if kind == wanted]
        for wanted in ("tensor", "integer", "number")
    )
    results = [name for name in tensors if name not in declaration.kinds]
    made = {", ".join(results): "make(x)"}
    if returns.fake is None:
        made = {
            name: f"None if x.{of} is None else " * (of in declaration.optional)
            + f"x.{of}.new_empty(x.{of}.shape)"
            for name, of in zip(results, returns.like, strict=False)
        }
    run = kernel(
        declaration.name,
        source,
        tensors=" ".join(tensors),
        integers=" ".join(integers),
        numbers=" ".join(numbers),
    )
    value = _values(declaration, cpp, source)
    passed = [f"x.{name}" if name in declaration.kinds else name for name in tensors]
    passed += map(value, integers)
    passed += [cpp.values.get(name, f"x.{name}") for name in numbers]
    written = " ".join(passed)
    owners = {owner for owner, _ in declaration.bound.values() if f"{owner}_shape[" in written}
    lines = [
        f"def {declaration.name}(x{', *, is_invariant=False' * ('is_invariant' in integers)}):",
        *(f"    {owner}_shape = x.{owner}.shape" for owner in sorted(owners)),
        *(f"    {name} = {value}" for name, value in made.items()),
        f"    if not run({', '.join(passed)}):",
        "        x.check_indices()",
        f"    return {', '.join(made)}",
    ]
    scope = {"run": run, "bf16": torch.bfloat16, "float32": torch.float32, "make": returns.fake}
    scope |= {"num_threads": torch.get_num_threads, "cpu_tuning": cpu_tuning}
    return compile_function("\n".join(lines), declaration.name, scope)


def _values(declaration: Declaration, cpp: Cpp, source: Path) -> Callable[[str], str]:
    """Return what writes the value of an integer of the struct, from the arguments ``x``."""
    special = {
        "is_bf16": f"x.{declaration.floating}.dtype is bf16",
        "num_threads": "num_threads()",
        "state_streams": f"cpu_tuning.tuning(x.{declaration.floating}.dtype).state_streams",
        **cpp.values,
    }

    def size_of(letter: re.Match[str]) -> str:
        owner, axis = declaration.bound[letter.group()]
        return f"{owner}_shape[{axis}]"

    usual = [size for size in _CPP_SIZES if size[0] in declaration.bound]
    for size, _, name in (each.partition("=") for each in [*usual, *cpp.sizes.split()]):
        special[name or size] = re.sub(r"[A-Za-z_]+", size_of, size)

    def value(name: str) -> str:
        if name in special:
            return special[name]
        if name.startswith("wide_"):
            wide = name.removeprefix("wide_")
            guard = f"x.{wide} is not None and " * (wide in declaration.optional)
            return f"{guard}x.{wide}.dtype is float32"
        rows = re.fullmatch(r"(\w+?)(?:_stride|_token|_row|(_head)(?:_stride)?)", name)
        if rows is None or rows[1] not in declaration.kinds:
            if name == "is_invariant":
                return name
            if name not in dir(declaration.cls):
                raise TypeError(f"{source} takes {name}, which no argument is named like")
            return f"x.{name}"
        stride = f"x.{rows[1]}.stride({int(rows[2] is not None)})"
        is_optional = rows[1] in declaration.optional
        return f"0 if x.{rows[1]} is None else {stride}" if is_optional else stride

    return value
