"""What the Triton kernels of delta rules' steps, those that verify drafts too, are launched with,
and what compiling them shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from tests.ops.delta_rule.step_cases import Case
from tests.ops.delta_rule.step_family import Family
from tests.ops.triton_compile import SHARED_LIMITS, Launch, launches_on, orders_of_sums
from tests.ops.triton_resources import assert_all_fit, resources_of


def record_launches(
    family: Family,
    target: str,
    case: Case,
    dtype: torch.dtype,
    *,
    verify: bool = False,
    opens: bool = False,
    impl: str = "triton",
) -> dict[str, Launch]:
    """What the launcher launches for inputs of a case, on tensors without memory, of a decode step
    or of one that verifies drafts; with ``opens``, by open chunks, and to close them."""
    inputs = family.make_inputs(case, dtype).without_memory()
    drafts = {"chunk": inputs.empty_chunk()} if opens else {}
    if verify:
        drafts = {"records": inputs.empty_records(3), "accepted": inputs.state_indices}
    given = replace(inputs, **drafts, impl=impl)
    with launches_on(target) as launches:
        family.implementations[impl].load()(given)
        if opens:
            nothing = {name: getattr(given, name)[:0] for name in inputs.per_token}
            family.implementations[impl].load()(replace(given, **nothing))
    return launches


def of_any_lengths(family: Family, target: str, case: Case) -> dict[str, dict[str, Launch]]:
    """What is launched for steps of any lengths: for a prompt, and for a token of each sequence."""
    lengths = {"a prompt": (64,), "64 tokens": (1,) * 64}
    return {
        name: record_launches(
            family, target, replace(case, lengths=each), torch.bfloat16, impl="triton_invariant"
        )
        for name, each in lengths.items()
    }


def sums_of_warps(launch: Launch) -> set[str]:
    """``orders_of_sums`` on Hopper of each warp: which of the rows it has, and how many, aside."""
    orders = orders_of_sums(launch, "sm_90")
    return {re.sub(r"warpsPerCTA = \S+ \S+|tensor<\d+x|tensor<\d+", "", order) for order in orders}


def check_fit(family: Family, shapes: Mapping[str, tuple[Case, torch.dtype]], table: Path) -> None:
    """No kernel spills, by model; those of steps of any lengths at the first model's sizes."""
    steps = {"decode": {}, "verify": {"verify": True}, "open": {"opens": True}}
    rows = [
        resources_of(launch, target, f"{label} {step} 64")
        for label, (case, dtype) in shapes.items()
        for target in SHARED_LIMITS
        for step, how in steps.items()
        for launch in record_launches(family, target, case, dtype, **how).values()
    ]
    label, (case, _) = next(iter(shapes.items()))
    rows += [
        resources_of(launch, target, f"{label} {name}")
        for target in SHARED_LIMITS
        for name, launches in of_any_lengths(family, target, case).items()
        for launch in launches.values()
    ]
    assert_all_fit(rows, table)


def check_rows_are_summed_alike(family: Family, case: Case) -> None:
    """However many of them a program of a step of any lengths has."""
    few, many = of_any_lengths(family, "sm_90", case).values()
    for name, launch in few.items():
        assert sums_of_warps(launch) == sums_of_warps(many[name]) != set()
        assert not launch.kwargs["enable_fp_fusion"]


def check_both_steps_sum_in_one_order(family: Family, case: Case) -> None:
    """Those that decode and those that verify, as they must, to leave the same bits; nothing is
    fused but what both write so."""
    step, verify = (
        record_launches(family, "sm_90", case, torch.bfloat16, verify=verify)
        for verify in (False, True)
    )
    assert list(step) == list(verify) == ["_prepare_kernel", "_walk_kernel", "_norm_kernel"]
    for name, launch in step.items():
        orders = set(orders_of_sums(launch, "sm_90"))
        assert orders == set(orders_of_sums(verify[name], "sm_90")) != set()
        assert not launch.kwargs["enable_fp_fusion"]
        assert not verify[name].kwargs["enable_fp_fusion"]
