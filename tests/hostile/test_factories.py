"""No tensor of the package is made in the dtype or on the device that a caller set as default.

A factory call that leaves either out works until somebody calls ``torch.set_default_dtype`` or
``torch.set_default_device``; one that gave half of the scratch that a kernel wrote to corrupted the
heap.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    file for folder in ("torch_hybrid", "ops", "graphs") for file in (ROOT / folder).rglob("*.py")
]
# fmt: off
FACTORIES = frozenset((
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye",
    "frombuffer", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    "Tensor", "BFloat16Tensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor",
    "LongTensor",
))
# fmt: on
LAYERS = frozenset(("Conv1d", "Embedding", "LayerNorm", "Linear", "RMSNorm"))
BOTH = {"dtype", "device"}
# It has no device to give: the memory that it is given is the host's.
NEEDED = {"frombuffer": {"dtype"}}


def careless(code: str) -> Iterator[str]:
    """Every factory of ``code`` that takes a default, or whose call cannot be seen."""
    tree = ast.parse(code)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for kind in ("annotation", "returns")
        if isinstance(root := getattr(node, kind, None), ast.AST)
        for part in ast.walk(root)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.nn"):
            for name in {alias.name for alias in node.names} & (FACTORIES - {"Tensor"} | LAYERS):
                yield f"line {node.lineno}: {name} is imported, and its calls cannot be told"
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.attr not in {"torch": FACTORIES, "nn": LAYERS}.get(node.value.id, ()):
            continue
        if id(node) in annotations or (node.value.id == "nn" and id(node) not in called):
            continue
        given = {word.arg for word in called[id(node)].keywords} if id(node) in called else set()
        if missing := NEEDED.get(node.attr, BOTH) - given:
            yield f"line {node.lineno}: {ast.unparse(node)} without {' and '.join(sorted(missing))}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_factory_call_gives_dtype_and_device(source: Path) -> None:
    assert list(careless(source.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "torch.empty(3)",
        "torch.zeros(3, dtype=torch.int32)",
        "torch.ones(3, device='cpu')",
        "torch.frombuffer(memory)",
        "torch.Tensor(3)",
        "partial(torch.zeros, device='cpu', dtype=torch.int32)",
        "from torch import arange",
        "nn.Linear(2, 3, device='meta')",
    ],
)
def test_careless_ones_are_found(code: str) -> None:
    assert len(list(careless(code))) == 1


def test_careful_ones_pass() -> None:
    code = "def f(x: torch.Tensor): return torch.full((), 1, dtype=x.dtype, device=x.device)"
    assert list(careless(code)) == []
