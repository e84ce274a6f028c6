"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.ssd.step_mamba2_cases import CASES, Case
from tests.ops.ssd.step_mamba2_family import FAMILY
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
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep

# What of the contract the interpreter can do in seconds. It cuts bfloat16 off where a GPU rounds,
# and here numbers are rounded four times, one after the other.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/ssd -k "step and mamba2 and triton"
CONTRACT = """
    step and mamba2 and (
        triton and (exact and fp32 and (mixed or norm_before_gate or odd_dims or bounded_steps)
        or another_slot or bits and fp32 and mixed)
        and not on_a_gpu and not interpreter
    )
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    check(FAMILY, case, dtype)


@needs_cuda
def test_a_captured_graph_serves_other_lengths():
    check_captured(FAMILY)


# (sequences, groups, heads, K, V, groups of the norm or 0, dtype)
SHAPES = {
    "Nemotron-H decode 64": (64, 8, 128, 128, 64, 8, torch.bfloat16),
    "Falcon-H1 decode 64": (64, 1, 24, 256, 64, 0, torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = [
        resources_of(launch, target, label + ", drafts" * name.endswith(", drafts"))
        for label, shape in SHAPES.items()
        for target in SHARED_LIMITS
        for name, launch in record_launches(target, *shape).items()
        if name != "_norm_kernel, drafts"
    ]
    assert_all_fit(rows, Path(__file__).with_name("resources_step_mamba2.txt"))


@needs_cross_compiler
def test_both_steps_sum_in_one_order() -> None:
    """As they must, to leave the same bits; nothing is fused but what both write so."""
    launches = record_launches("sm_90", *SHAPES["Nemotron-H decode 64"])
    step, verify = (launches[f"_walk_kernel{form}"] for form in ("", ", drafts"))
    assert orders_of_sums(step, "sm_90") == orders_of_sums(verify, "sm_90") != []
    assert not step.kwargs["enable_fp_fusion"]
    assert not verify.kwargs["enable_fp_fusion"]


def record_launches(
    target: str,
    num_seqs: int,
    num_groups: int,
    num_heads: int,
    k_dim: int,
    v_dim: int,
    norm_groups: int,
    dtype: torch.dtype,
) -> dict[str, Launch]:
    """What the launchers launch for slices of a projection."""
    from torch_hybrid.ops.ssd import _triton_step_mamba2

    inner = num_heads * v_dim
    channels = inner + 2 * num_groups * k_dim
    widths = [inner, channels, num_heads]
    projected = torch.empty(num_seqs, sum(widths), dtype=dtype, device="meta")
    z, xBC, dt = projected.split(widths, 1)
    empty = projected.new_empty
    indices = empty(num_seqs + 1, dtype=torch.int32)
    tensors = (
        xBC,
        z,
        dt,
        empty(channels, 4),
        empty(channels),
        empty(num_heads),
        empty(num_heads),
        empty(num_heads),
        empty(inner) if norm_groups else None,
        empty(num_seqs + 1, 3, channels),
        empty(num_seqs + 1, num_heads, v_dim, k_dim, dtype=torch.float32),
        indices,
        indices[1:],
        indices[1:],
    )
    options = {
        "activation": "silu",
        "dt_min": 0.0,
        "dt_max": float("inf"),
        "norm_before_gate": False,
        "norm_groups": norm_groups or 1,
        "norm_eps": 1e-5,
    }
    records = empty(num_seqs + 1, 3, channels + num_heads)
    step = SsdStep(*tensors, **options, impl="triton")
    drafted = replace(step, records=records, accepted=indices[1:])
    with launches_on(target) as verified:
        _triton_step_mamba2.ssd_step(drafted)
    with launches_on(target) as launches:
        _triton_step_mamba2.ssd_step(step)
    drafts = {f"{name}, drafts": launch for name, launch in verified.items()}
    return launches | drafts
