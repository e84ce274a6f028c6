"""What the Triton kernels of delta rules' decode steps are launched with."""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch

from tests.ops.delta_step_cases import Case
from tests.ops.delta_step_family import Family
from tests.ops.triton_compile import Launch, launches_on


def record_launches(
    family: Family, target: str, case: Case, dtype: torch.dtype
) -> dict[str, Launch]:
    """What the launcher launches for inputs of a case, on tensors without memory."""
    name = family.op.__name__
    launcher = importlib.import_module(f"torch_hybrid.ops.{name}._triton")
    inputs = family.make_inputs(case, dtype)
    laid_out_alike = {
        each: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for each, x in inputs.tensors().items()
        if x is not None
    }
    with launches_on(target) as launches:
        getattr(launcher, name)(*replace(inputs, **laid_out_alike).args(), **inputs.options())
    return launches
