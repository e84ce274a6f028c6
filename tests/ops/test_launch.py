"""Arguments that kernels take by the names of an op's."""

from __future__ import annotations

from typing import Any, NamedTuple

import expecttest
import pytest
import torch

from torch_hybrid.ops.rg_lru.op import RgLru
from torch_hybrid.ops.triton.launch import bind


class Kernel:
    """Kernel that keeps what it is launched with."""

    def __init__(self, names: str) -> None:
        self.arg_names = names.split()
        self.fn = Kernel
        self.launches: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.launches.append((grid, arguments))


class Tiles(NamedTuple):
    block_c: int
    state: str = "the op's comes first"


def _call() -> RgLru:
    slots = torch.tensor([1, 2], dtype=torch.int32)
    return RgLru(
        torch.zeros(5, 12)[:, :4],
        torch.zeros(5, 2, 4),
        torch.zeros(4),
        torch.zeros(3, 4),
        torch.tensor([0, 2, 5], dtype=torch.int32),
        slots,
        slots,
        impl="triton",
    )


def test_binds_what_is_named() -> None:
    x, kernel = _call(), Kernel("x state out num_tokens num_seqs BLOCK_C IMPL D C H")
    out = torch.zeros(5, 4)
    bind(kernel, x, Tiles(block_c=64))[3, 2](out=out, D=7, num_warps=4)
    [(grid, arguments)] = kernel.launches
    tensors = [arguments.pop(name) for name in ("x", "state", "out")]
    assert all(a is b for a, b in zip(tensors, (x.x, x.state, out), strict=True))
    sizes = {"num_tokens": 5, "num_seqs": 2, "BLOCK_C": 64, "IMPL": "triton", "C": 4, "H": 2}
    assert (grid, arguments) == ((3, 2), sizes | {"D": 7, "num_warps": 4})


def test_strides_are_of_what_is_launched() -> None:
    x, kernel = _call(), Kernel("x z stride_x STRIDE_GATES_TOKEN stride_gates_head stride_z")
    for given, stride in ((None, 12), (x.x.contiguous(), 4)):
        bind(kernel, x)[(1,)](z=None, **({} if given is None else {"x": given}))
        _, arguments = kernel.launches[-1]
        assert [arguments[name] for name in kernel.arg_names[2:]] == [stride, 8, 4, 0]


def test_says_what_is_missing() -> None:
    with pytest.raises(TypeError) as raised:
        bind(Kernel("x z"), _call())[(1,)]()
    expecttest.assert_expected_inline(
        str(raised.value), """Kernel takes z, which no argument is named like"""
    )
