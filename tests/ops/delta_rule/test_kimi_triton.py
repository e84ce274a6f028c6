"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.delta_rule.cases import Case
from tests.ops.delta_rule.kernels import Shape, check, check_captured, record_recurrent
from tests.ops.delta_rule.kimi import CASES, case, make_inputs
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.delta_rule import kimi_delta_attention
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference

KIMI = (kimi_delta_attention, delta_rule_reference)

# What of the contract the interpreter can do in seconds; it takes milliseconds a token and head.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/delta_rule -k triton
CONTRACT = """
    kimi and (recurrent-triton and (
        exact and (one_token or decode or odd_dims) or segments
    ) or in_interpreter)
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_interpreter
@pytest.mark.parametrize(
    "shape",
    [
        case(1, 3, num_heads=1, k_dim=128, v_dim=128),
        case(2, num_heads=1, k_dim=80, v_dim=72),
        case(2, num_heads=1, k_dim=260, v_dim=20),
    ],
    ids=["kimi_linear", "unlike_dims", "blocks_of_four_rows"],
)
def test_blocks_of_a_head_in_interpreter(shape: Case):
    check(*KIMI, "cpu", make_inputs(shape, torch.bfloat16))


@needs_interpreter
@pytest.mark.parametrize("decay", [0.0, -5.0, -50.0, -torch.inf])
def test_any_decay_in_interpreter(decay: float):
    inputs = make_inputs(case(5, 2, num_heads=1))
    check(*KIMI, "cpu", replace(inputs, g=torch.full_like(inputs.g, decay)))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(shape: Case, dtype: torch.dtype):
    check(*KIMI, "cuda", make_inputs(shape, dtype))


@needs_cuda
def test_a_captured_graph_serves_other_lengths():
    """Three sequences of a bucket of eight tokens, replayed with other lengths and slots."""
    check_captured(
        *KIMI,
        make_inputs(case(1, 1, 1, num_padding_tokens=5)),
        make_inputs(case(4, 0, 3, num_padding_tokens=1), seed=1),
    )


LAYER = {"num_seqs": 64, "num_k_heads": 32, "num_v_heads": 32, "k_dim": 128, "v_dim": 128}
SHAPES = {
    "Kimi-Linear decode 64": Shape(**LAYER, num_tokens=64, dtype=torch.bfloat16, channels=True),
    "Kimi-Linear decode 64 float32": Shape(
        **LAYER, num_tokens=64, dtype=torch.float32, channels=True
    ),
    "Kimi-Linear 4 tokens each": Shape(
        **LAYER, num_tokens=256, dtype=torch.bfloat16, channels=True
    ),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = [
        resources_of(launch, target, label)
        for label, shape in SHAPES.items()
        for target in SHARED_LIMITS
        for launch in record_recurrent(target, shape).values()
    ]
    assert_all_fit(rows, Path(__file__).with_name("resources_kimi_recurrent.txt"))
