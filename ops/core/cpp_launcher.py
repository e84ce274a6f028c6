"""Launchers of C++ kernels, whose arguments are an op's fields by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.declaration import Declaration, compile_function
from torch_hybrid.ops.core.kinds import Returns
from torch_hybrid.ops.core.op import Op
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


def cpp_launcher(
    cls: type[Op],
    source: Path,
    *,
    integers: str,
    sizes: str = "",
    values: Mapping[str, str] | None = None,
    numbers: str = "",
    tensors: str = "",
    out: str | Callable[[Any], Tensor | tuple[Tensor, ...]],
    results: str = "out",
) -> Callable[..., Any]:
    """Make the launcher of a C++ kernel.

    Args:
        cls: the op's class.
        source: of the kernel, whose function has the op's name.
        sizes: letters, or expressions of them without blanks, and what the struct calls them:
            ``"T=num_tokens D//2=half_dim N"``.
        integers: of the struct in its order: names of sizes and values, ``<field>_stride`` and
            ``<field>_head_stride`` of rows, ``is_bf16``, ``wide_<field>`` (float32),
            ``num_threads``, ``state_streams``; options and properties of the op. With
            ``is_invariant``, that is the launcher's option. ``<field>_token`` and ``<field>_row``
            are the first stride too, ``<field>_head`` the second.
        values: expressions of ``x``, an instance of ``cls``, by the struct's names of them.
        numbers: options and values that the struct has as doubles.
        tensors: of the struct in its order, unless those are the op's and then the results.
        out: field that the result has shape and dtype of, or what makes the result from an instance
            of ``cls``. Several are named as in the struct: ``"out=o_a lse=lse_a"``; one like a
            field that is None is None. Empty: it returns nothing.
        results: what the struct calls those that ``out`` makes.
    """
    declaration = Declaration(cls)
    if isinstance(out, str):
        named = [each.rpartition("=") for each in out.split()]
        made = {
            name or "out": f"None if x.{of} is None else " * (of in declaration.optional)
            + f"x.{of}.new_empty(x.{of}.shape)"
            for name, _, of in named
        }
    else:
        made = {", ".join(results.split()): "make(x)"}
    returned = ", ".join(made)
    names = tensors.split() or [*declaration.kinds, *returned.split(", ")]
    run = kernel(
        declaration.name,
        source,
        tensors=" ".join(names),
        integers=integers,
        numbers=numbers,
    )
    special = {
        "is_bf16": f"x.{declaration.floating}.dtype is bf16",
        "num_threads": "num_threads()",
        "state_streams": f"cpu_tuning.tuning(x.{declaration.floating}.dtype).state_streams",
        **(values or {}),
    }

    def size_of(letter: re.Match[str]) -> str:
        owner, axis = declaration.bound[letter.group()]
        return f"{owner}_shape[{axis}]"

    for size, _, name in (each.partition("=") for each in sizes.split()):
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
            if name not in dir(cls):
                raise TypeError(f"{source} takes {name}, which no argument is named like")
            return f"x.{name}"
        stride = f"x.{rows[1]}.stride({int(rows[2] is not None)})"
        is_optional = rows[1] in declaration.optional
        return f"0 if x.{rows[1]} is None else {stride}" if is_optional else stride

    passed = [f"x.{name}" if name in declaration.kinds else name for name in names]
    passed += map(value, integers.split())
    passed += [special.get(name, f"x.{name}") for name in numbers.split()]
    written = " ".join(passed)
    owners = {owner for owner, _ in declaration.bound.values() if f"{owner}_shape[" in written}
    lines = [
        f"def {declaration.name}(x{', *, is_invariant=False' * ('is_invariant' in integers)}):",
        *(f"    {owner}_shape = x.{owner}.shape" for owner in sorted(owners)),
        *(f"    {name} = {value}" for name, value in made.items()),
        f"    if not run({', '.join(passed)}):",
        "        x.check_indices()",
        f"    return {returned}",
    ]
    scope = {"run": run, "bf16": torch.bfloat16, "float32": torch.float32, "make": out}
    scope |= {"num_threads": torch.get_num_threads, "cpu_tuning": cpu_tuning}
    return compile_function("\n".join(lines), declaration.name, scope)


def load_cpp(
    declaration: Declaration,
    returns: Returns[Any],
    cpp: Cpp,
    source: Path,
) -> Callable[..., Any]:
    """Build a C++ kernel and make its launcher, of fields that the kernel's struct declares."""
    fields = declared_fields(declaration.name, source)
    tensors, integers, numbers = (
        " ".join(name for name, kind in fields if kind == wanted)
        for wanted in ("tensor", "integer", "number")
    )
    results = [name for name in tensors.split() if name not in declaration.kinds]
    pairs = (f"{name}={of}" for name, of in zip(results, returns.like, strict=False))
    usual = " ".join(size for size in _CPP_SIZES if size[0] in declaration.bound)
    return cpp_launcher(
        declaration.cls,
        source,
        sizes=f"{usual} {cpp.sizes}",
        values=cpp.values,
        tensors=tensors,
        integers=integers,
        numbers=numbers,
        out=returns.fake or " ".join(pairs),
        results=" ".join(results),
    )
