"""How the Triton kernels of delta rules' decode steps are tested, compiled and on a GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch

from tests.ops.contract import rows_apart
from tests.ops.delta_step_cases import TENSORS, Case, Inputs
from tests.ops.delta_step_contract import expect
from tests.ops.delta_step_family import Family
from tests.ops.triton_compile import Launch, launches_on


def check(family: Family, case: Case, dtype: torch.dtype) -> None:
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
        for name in TENSORS:
            if getattr(captured, name) is not None:
                getattr(captured, name).copy_(getattr(expected.inputs, name))
        graph.replay()
        expected.check(out.cpu(), on_device(captured, "cpu"))


def on_device(inputs: Inputs, device: str = "cuda") -> Inputs:
    """Copies on a device; rows of tokens still lie apart."""
    tensors = {name: getattr(inputs, name) for name in TENSORS}
    moved = {n: x.to(device, copy=True) for n, x in tensors.items() if x is not None}
    return replace(inputs, **moved | {n: rows_apart(moved[n]) for n in inputs.tokens(slice(None))})


def record_launches(
    family: Family, target: str, case: Case, dtype: torch.dtype
) -> dict[str, Launch]:
    """What the launcher launches for inputs of a case, on tensors without memory."""
    name = family.op.__name__
    launcher = importlib.import_module(f"torch_hybrid.ops.{name}._triton")
    inputs = family.make_inputs(case, dtype)
    tensors = {each: getattr(inputs, each) for each in TENSORS}
    laid_out_alike = {
        each: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for each, x in tensors.items()
        if x is not None
    }
    with launches_on(target) as launches:
        getattr(launcher, name)(*replace(inputs, **laid_out_alike).args(), **inputs.options())
    return launches
