"""What the Triton kernels of delta rules' steps are launched with, those that verify drafts too."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import torch

from tests.ops.delta_step_cases import Case
from tests.ops.delta_step_family import Family
from tests.ops.triton_compile import Launch, launches_on, orders_of_sums


def record_launches(
    family: Family,
    target: str,
    case: Case,
    dtype: torch.dtype,
    *,
    verify: bool = False,
    form: str = "",
) -> dict[str, Launch]:
    """What the launcher launches for inputs of a case, on tensors without memory, of a decode step
    or of one that verifies drafts; ``form`` is what stands before the launcher's name."""
    name = family.op.__name__
    launcher = importlib.import_module(f"torch_hybrid.ops.{name}._triton")
    inputs = family.make_inputs(case, dtype)
    laid_out_alike = {
        each: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for each, x in inputs.tensors().items()
        if x is not None
    }
    args = replace(inputs, **laid_out_alike).args()
    drafts: tuple[torch.Tensor, ...] = ()
    if verify:
        width = sum(laid_out_alike[each].shape[1] for each in ("qkv", "b", "a"))
        records = laid_out_alike["qkv"].new_empty(len(inputs.state), 3, width)
        drafts = (records, laid_out_alike["state_indices"])
    with launches_on(target) as launches:
        getattr(launcher, form + name)(*args, *drafts, **inputs.options())
    return launches


def of_any_lengths(family: Family, target: str, case: Case) -> dict[str, dict[str, Launch]]:
    """What is launched for steps of any lengths: for a prompt, and for a token of each sequence."""
    lengths = {"a prompt": (64,), "64 tokens": (1,) * 64}
    return {
        name: record_launches(
            family, target, replace(case, lengths=each), torch.bfloat16, form="invariant_"
        )
        for name, each in lengths.items()
    }


def sums_of_warps(launch: Launch) -> set[str]:
    """``orders_of_sums`` on Hopper of each warp: which of the rows it has, and how many, aside."""
    orders = orders_of_sums(launch, "sm_90")
    return {re.sub(r"warpsPerCTA = \S+ \S+|tensor<\d+x|tensor<\d+", "", order) for order in orders}
