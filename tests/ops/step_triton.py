"""How the Triton kernels of mixers' decode steps are tested on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.ops.contract import rows_apart
from tests.ops.step_contract import expect
from tests.ops.step_family import Family


def check(family: Family, case: Any, dtype: torch.dtype) -> None:
    """The kernel on a GPU is as exact as the reference."""
    moved = on_device(family.make_inputs(case, dtype))
    out = family.run(moved, "triton")
    expect(family, case, dtype).check(out.cpu(), on_device(moved, "cpu"))


def check_captured(family: Family) -> None:
    """Three sequences of a bucket of five, replayed with other lengths and slots."""
    captured = on_device(family.mixed(lengths=(1, 1, 1), num_padding_tokens=2))
    family.run(captured, "triton")  # compiles the kernel, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = family.run(captured, "triton")
    for lengths in [(1, 0, 1), (0, 1, 0)]:
        padding = 5 - sum(lengths)
        case = replace(family.cases["mixed"], lengths=lengths, num_padding_tokens=padding)
        expected = expect(family, case, torch.float32)
        for name, x in captured.tensors().items():
            if x is not None:
                x.copy_(getattr(expected.inputs, name))
        graph.replay()
        expected.check(out.cpu(), on_device(captured, "cpu"))


def on_device(inputs: Any, device: str = "cuda") -> Any:
    """Copies on a device; rows of tokens still lie apart."""
    tensors = inputs.tensors().items()
    moved = {n: x.to(device, copy=True) for n, x in tensors if x is not None}
    return replace(inputs, **moved | {n: rows_apart(moved[n]) for n in inputs.tokens(slice(None))})
