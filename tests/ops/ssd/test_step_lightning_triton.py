"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.ssd.step_lightning_cases import CASES, Case
from tests.ops.ssd.step_lightning_family import FAMILY
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
from torch_hybrid.ops.ssd.op_step_lightning import LightningStep

# What of the contract the interpreter can do in seconds. It cuts bfloat16 off where a GPU rounds,
# and here numbers are rounded four times, one after the other.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/ssd -k "step and lightning and triton"
CONTRACT = """
    step and lightning and (
        triton and (exact and fp32 and (mixed or odd_dims or rotated or ungated)
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


# (sequences, heads, dim, rotated, groups of the norm, dtype); no angles, no norm of q and k
SHAPES = {
    "Ling decode 64": (64, 32, 128, 64, 8, torch.bfloat16),
    "MiniMax-01 decode 64": (64, 64, 128, None, 1, torch.bfloat16),
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
    assert_all_fit(rows, Path(__file__).with_name("resources_step_lightning.txt"))


@needs_cross_compiler
def test_both_steps_sum_in_one_order() -> None:
    """As they must, to leave the same bits; nothing is fused but what both write so."""
    launches = record_launches("sm_90", *SHAPES["Ling decode 64"])
    step = launches["_walk_kernel"]
    parts = [launches[f"_{name}_kernel, drafts"] for name in ("prepare", "walk")]
    verified = [order for part in parts for order in orders_of_sums(part, "sm_90")]
    assert orders_of_sums(step, "sm_90") == sorted(verified) != []
    assert not any(launch.kwargs["enable_fp_fusion"] for launch in (step, *parts))


def record_launches(
    target: str,
    num_seqs: int,
    num_heads: int,
    dim: int,
    rotary_dim: int | None,
    norm_groups: int,
    dtype: torch.dtype,
) -> dict[str, Launch]:
    """What the launchers launch for slices of a projection."""
    from torch_hybrid.ops.ssd import _triton_step_lightning

    width, is_ring = num_heads * dim, rotary_dim is not None
    projected = torch.empty(num_seqs, 4 * width, dtype=dtype, device="meta")
    qkv, gate = projected.split([3 * width, width], 1)
    empty = projected.new_empty
    angles = empty(num_seqs, (rotary_dim or 0) // 2, dtype=torch.float32) if is_ring else None
    weight = empty(dim) if is_ring else None
    indices = empty(num_seqs + 1, dtype=torch.int32)
    tensors = (
        qkv,
        gate,
        weight,
        weight,
        angles,
        angles,
        empty(num_heads, dtype=torch.float32),
        empty(width),
        empty(num_seqs + 1, num_heads, dim, dim, dtype=torch.float32),
        indices,
        indices[1:],
        indices[1:],
    )
    options = {
        "activation": "none" if is_ring else "silu",
        "scale": 1.0,
        "norm_groups": norm_groups,
        "norm_eps": 1e-5,
    }
    records = empty(num_seqs + 1, 3, 2 * width, dtype=torch.float32)
    step = LightningStep(*tensors, **options, impl="triton")
    drafted = replace(step, records=records, accepted=indices[1:])
    with launches_on(target) as verified:
        _triton_step_lightning.lightning_step(drafted)
    with launches_on(target) as launches:
        _triton_step_lightning.lightning_step(step)
    drafts = {f"{name}, drafts": launch for name, launch in verified.items()}
    return launches | drafts
