"""The Triton kernels of steps: in the interpreter, compiled for GPUs not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.ssd.step_lightning_cases import FAMILY as LIGHTNING
from tests.ops.ssd.step_mamba2_cases import FAMILY as MAMBA2
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
from torch_hybrid.ops.ssd.op_step_lightning import LightningStep
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep

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
FAMILIES = {"lightning": LIGHTNING, "mamba2": MAMBA2}
of_each = pytest.mark.parametrize("name", FAMILIES)
# Lightning's: (sequences, heads, dim, rotated, groups of the norm, dtype); no angles, no norm of q
# and k. Mamba2's: (sequences, groups, heads, K, V, groups of the norm or 0, dtype).
SHAPES: dict[str, dict[str, tuple[Any, ...]]] = {
    "lightning": {
        "Ling decode 64": (64, 32, 128, 64, 8, torch.bfloat16),
        "MiniMax-01 decode 64": (64, 64, 128, None, 1, torch.bfloat16),
    },
    "mamba2": {
        "Nemotron-H decode 64": (64, 8, 128, 128, 64, 8, torch.bfloat16),
        "Falcon-H1 decode 64": (64, 1, 24, 256, 64, 0, torch.bfloat16),
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
        for (kernel, what), launch in record_launches(name, target, *shape).items()
        if (kernel, bool(what)) not in (("_norm_kernel", True), ("_conv_kernel", True))
    ]
    assert_all_fit(rows, Path(__file__).with_name(f"resources_step_{name}.txt"))


@needs_cross_compiler
@of_each
def test_both_steps_sum_in_one_order(name: str) -> None:
    """As they must, to leave the same bits; nothing is fused but what both write so."""
    launches = record_launches(name, "sm_90", *next(iter(SHAPES[name].values())))
    step = launches["_walk_kernel", ""]
    parts = [launches[f"_{part}_kernel", ", drafts"] for part in WALKS[name]]
    verified = [order for part in parts for order in orders_of_sums(part, "sm_90")]
    expected = sorted(verified) if len(parts) > 1 else verified
    assert orders_of_sums(step, "sm_90") == expected != []
    assert not any(launch.kwargs["enable_fp_fusion"] for launch in (step, *parts))


def record_launches(name: str, target: str, *shape: Any) -> dict[tuple[str, str], Launch]:
    """What the launchers launch for slices of a projection, by kernel and by what a step does more
    than decode."""
    step, width = (lightning if name == "lightning" else mamba2)(*shape)
    num_slots = len(step.state)
    dtype = torch.float32 if name == "lightning" else step.dt.dtype
    records = step.state.new_empty(num_slots, 3, width, dtype=dtype)
    opened = replace(step, chunk=step.state.new_empty(num_slots, step.chunk_width))
    steps = {
        "": [step],
        ", drafts": [replace(step, records=records, accepted=step.state_indices)],
        ", open": [opened, opened.without_tokens()],
    }
    launch = FAMILIES[name].implementations["triton"].load()
    found = {}
    for what, each in steps.items():
        with launches_on(target) as launches:
            for call in each:
                launch(call)
        found |= {(kernel, what): launched for kernel, launched in launches.items()}
    return found


def lightning(
    num_seqs: int,
    num_heads: int,
    dim: int,
    rotary_dim: int | None,
    norm_groups: int,
    dtype: torch.dtype,
) -> tuple[LightningStep, int]:
    """Make a step without memory, and tell how wide a record is."""
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
    return LightningStep(*tensors, **options, impl="triton"), 2 * width


def mamba2(
    num_seqs: int,
    num_groups: int,
    num_heads: int,
    k_dim: int,
    v_dim: int,
    norm_groups: int,
    dtype: torch.dtype,
) -> tuple[SsdStep, int]:
    """Make a step without memory, and tell how wide a record is."""
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
    return SsdStep(*tensors, **options, impl="triton"), channels + num_heads
