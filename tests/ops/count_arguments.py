"""Counts of what host code of ops/ takes as parameters and passes on unchanged.

    python -m tests.ops.count_arguments [FOLDER]     the folder ops/ of a checkout

A host function is any but a Triton or Gluon kernel. An argument is passed on where a call inside of
a function has the bare name of one of its parameters.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPS = Path(__file__).parents[2] / "ops"
MANY = 10


@dataclass(frozen=True, slots=True)
class HostFunction:
    """Function of host code: where it stands, what it takes, and how much it hands on."""

    place: str
    parameters: tuple[str, ...]
    passed_on: int


def host_functions(folder: Path) -> Iterator[HostFunction]:
    """Find the host functions of all modules below a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not _is_kernel(node):
                taken = tuple(each.arg for each in _parameters(node))
                passed = sum(_is_one_of(each, taken) for each in _arguments(node))
                place = f"{path.relative_to(folder)}:{node.lineno} {node.name}"
                yield HostFunction(place, taken, passed)


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _parameters(node: ast.FunctionDef) -> Iterator[ast.arg]:
    """List the parameters that a caller names; an object's own is none."""
    for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        if each.arg not in ("self", "cls"):
            yield each


def _arguments(node: ast.FunctionDef) -> Iterator[ast.expr]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield from inner.args
            yield from (keyword.value for keyword in inner.keywords)


def _is_one_of(value: ast.expr, names: tuple[str, ...]) -> bool:
    return isinstance(value, ast.Name) and value.id in names


def main() -> None:
    """Print the counts, and the functions of many parameters."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=OPS)
    found = list(host_functions(parser.parse_args().folder))
    taken, passed = (
        sum(n) for n in zip(*((len(f.parameters), f.passed_on) for f in found), strict=True)
    )
    many = [each for each in found if len(each.parameters) > MANY]
    print(*(f"{len(each.parameters):3} {each.place}" for each in many), sep="\n")
    print(f"{taken} parameters and {passed} arguments passed on unchanged: {taken + passed}")
    print(f"{len(many)} of {len(found)} host functions take more than {MANY}")


if __name__ == "__main__":
    main()
