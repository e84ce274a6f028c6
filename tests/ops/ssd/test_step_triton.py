"""The Triton kernels of steps: in the interpreter, compiled for GPUs not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.ssd import step_lightning_cases as lightning
from tests.ops.ssd import step_mamba2_cases as mamba2
from tests.ops.step_family import Family
from tests.ops.step_triton import check, check_captured
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    launches_on,
    needs_cross_compiler,
    orders_of_sums,
)
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of

# What of the contract the interpreter can do in seconds. It cuts bfloat16 off where a GPU rounds,
# and here numbers are rounded four times, one after the other.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/ssd -k "step and triton"
CONTRACT = """
    step and triton and not on_a_gpu and not interpreter and (
        exact and fp32 and (
            mixed or odd_dims
            or lightning and (rotated or ungated)
            or mamba2 and (norm_before_gate or bounded_steps)
        )
        or another_slot or bits and fp32 and mixed
    )
"""
test_in_the_interpreter = interprets(CONTRACT)
FAMILIES = {"lightning": lightning.FAMILY, "mamba2": mamba2.FAMILY}
of_each = pytest.mark.parametrize("name", FAMILIES)
SHAPES: dict[str, dict[str, Any]] = {
    "lightning": {
        "Ling decode 64": lightning.Case(
            lengths=(1, 1), num_heads=32, dim=128, rotary_dim=64, norm_groups=8
        ),
        "MiniMax-01 decode 64": lightning.Case(
            lengths=(1, 1),
            num_heads=64,
            dim=128,
            rotary_dim=None,
            qk_norm=False,
            norm_groups=1,
            activation="silu",
        ),
    },
    "mamba2": {
        "Nemotron-H decode 64": mamba2.Case(
            lengths=(1, 1), num_groups=8, num_heads=128, k_dim=128, v_dim=64, norm_groups=8
        ),
        "Falcon-H1 decode 64": mamba2.Case(
            lengths=(1, 1), num_groups=1, num_heads=24, k_dim=256, v_dim=64, gate="no_norm"
        ),
    },
}
# A step that verifies prepares rows in a kernel of its own, or does so in its walk.
WALKS = {"lightning": ("prepare", "walk"), "mamba2": ("walk",)}


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, id=f"{name}-{label}")
        for name, family in FAMILIES.items()
        for label, case in family.cases.items()
    ],
)
def test_on_a_gpu(family: Family, case: Any, dtype: torch.dtype):
    check(family, case, dtype)


@needs_cuda
@of_each
def test_a_captured_graph_serves_other_lengths(name: str):
    check_captured(FAMILIES[name])


@needs_cross_compiler
@of_each
def test_compiles_without_spills(name: str) -> None:
    rows = [
        resources_of(launch, target, label + what)
        for label, shape in SHAPES[name].items()
        for target in SHARED_LIMITS
        for (kernel, what), launch in record_launches(name, target, shape).items()
        if (kernel, bool(what)) not in (("_norm_kernel", True), ("_conv_kernel", True))
    ]
    assert_all_fit(rows, Path(__file__).with_name(f"resources_step_{name}.txt"))


@needs_cross_compiler
@of_each
def test_both_steps_sum_in_one_order(name: str) -> None:
    """As they must, to leave the same bits; nothing is fused but what both write so."""
    launches = record_launches(name, "sm_90", next(iter(SHAPES[name].values())))
    step = launches["_walk_kernel", ""]
    parts = [launches[f"_{part}_kernel", ", drafts"] for part in WALKS[name]]
    verified = [order for part in parts for order in orders_of_sums(part, "sm_90")]
    expected = sorted(verified) if len(parts) > 1 else verified
    assert orders_of_sums(step, "sm_90") == expected != []
    assert not any(launch.kwargs["enable_fp_fusion"] for launch in (step, *parts))


def record_launches(name: str, target: str, case: Any) -> dict[tuple[str, str], Launch]:
    """What the launchers launch for slices of a projection, by kernel and by what a step does more
    than decode."""
    family = FAMILIES[name]
    step = family.make_inputs(case, torch.bfloat16).without_memory()
    if name == "lightning":  # a scale of 1 compiles apart
        step = replace(step, scale=1.0)
    opened = replace(step, chunk=step.empty_chunk())
    drafts = {"records": step.empty_records(3), "accepted": step.state_indices}
    steps = {
        "": [step],
        ", drafts": [replace(step, **drafts)],
        ", open": [opened, opened.without_tokens()],
    }
    launch = family.implementations["triton"].load()
    found = {}
    for what, each in steps.items():
        with launches_on(target) as launches:
            for call in each:
                launch(call)
        found |= {(kernel, what): launched for kernel, launched in launches.items()}
    return found
