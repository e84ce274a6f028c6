"""A declared op that mutates a pool, exported with free sizes and packaged by AOTInductor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from tests.ops.wkv.cases import Case, make_inputs
from tests.test_examples import ONE_PACKAGE
from torch_hybrid.ops.wkv import wkv

LENGTHS = (3, 1, 5)
POOL = 4  # among the arguments
OTHERS = ((2, 7), (4, 1, 1, 9, 3))


class Layer(torch.nn.Module):
    """Two calls, the second on the state that the first has left."""

    def forward(self, k: Tensor, *given: Tensor) -> Tensor:
        first = wkv(k, *given, impl="torch")
        return first + wkv(first + 1, *given, impl="torch")


def arguments(*lengths: int) -> tuple[Tensor, ...]:
    """Tensors of their own: an export remembers of a view what it is a view of."""
    return tuple(x.clone() for x in make_inputs(Case(lengths=lengths)).args())


def exported() -> torch.export.ExportedProgram:
    given = arguments(*LENGTHS)
    axes = [dict.fromkeys(range(x.ndim), Dim.AUTO) for x in given]
    shapes = {"k": axes[0], "given": tuple(axes[1:])}
    return torch.export.export(Layer(), given, dynamic_shapes=shapes)


@torch.no_grad()
def test_an_exported_program_writes_the_pool() -> None:
    program = exported()
    mutated = program.run_decompositions({}).graph_signature.user_inputs_to_mutate
    assert [*mutated.values()] == [f"given_{POOL - 1}"]
    assert_agrees(program.module())


@pytest.mark.slow
@torch.no_grad()
def test_a_package_writes_the_pool(tmp_path: Path) -> None:
    path = str(tmp_path / "layer.pt2")
    with torch._inductor.config.patch(ONE_PACKAGE):
        torch._inductor.aoti_compile_and_package(exported(), package_path=path)
    assert_agrees(torch._inductor.aoti_load_package(path))


def assert_agrees(program: object) -> None:
    """The program gives what the module gives, and leaves the same states."""
    assert callable(program)
    for lengths in (LENGTHS, *OTHERS):
        expected, given = arguments(*lengths), arguments(*lengths)
        torch.testing.assert_close(program(*given), Layer()(*expected))
        torch.testing.assert_close(given[POOL], expected[POOL], equal_nan=True)
        assert not torch.equal(given[POOL].nan_to_num(), arguments(*lengths)[POOL].nan_to_num())
