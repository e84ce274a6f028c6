"""Which Triton kernels there are, read from the sources, and which of them a call launches.

Those in Gluon, Triton's own lower language, are for Hopper alone, and are not interpreted.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch_hybrid import ops

OPS = Path(ops.__path__[0])

Kernel = tuple[str, str]  # its module in ops ("ssd._triton"), and its name: "walk" of _walk_kernel
PACKAGE = f"{ops.__name__}."


def all_kernels(*, gluon: bool = True) -> set[Kernel]:
    """Every Triton kernel of the package that is launched by itself, and those in ``gluon``."""
    return {kernel for kernel, jit in _jits().items() if gluon or jit == "triton.jit"}


@cache
def _jits() -> dict[Kernel, str]:
    """What makes each of them a kernel."""
    sources = {file: file.read_text(encoding="utf-8") for file in OPS.rglob("*.py")}
    return {
        (".".join(file.relative_to(OPS).with_suffix("").parts), short_name(node.name)): jit
        for file, source in sources.items()
        if "_kernel(" in source
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        for decorator in node.decorator_list
        if (jit := ast.unparse(decorator).partition("(")[0]) in ("triton.jit", "gluon.jit")
    }


def short_name(function: str) -> str:
    """What tables call a kernel."""
    return function.strip("_").removesuffix("_kernel")


@contextmanager
def launched_kernels(*, dry: bool = False) -> Iterator[set[Kernel]]:
    """The kernels that are launched in the body, or with ``dry`` would be."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    seen: set[Kernel] = set()

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            module = kernel.fn.__module__.removeprefix(PACKAGE)
            seen.add((module, short_name(kernel.fn.__name__)))
            return None if dry else run(kernel, *args, **kwargs)

        return noted

    before = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
    for kind, run in before.items():
        kind.run = noting(run)
    try:
        yield seen
    finally:
        for kind, run in before.items():
            kind.run = run
