"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.delta_rule.cases import Case
from tests.ops.delta_rule.gated import CASES, make_inputs
from tests.ops.delta_rule.kernels import Shape, check, check_captured, record_recurrent
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.delta_rule import gated_delta_rule
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference

GATED = (gated_delta_rule, delta_rule_reference)

# What of the contract the interpreter can do in seconds; it takes milliseconds a token and head.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/delta_rule -k triton
CONTRACT = """
    gated and (recurrent-triton and (
        exact and (one_token or decode or three_value_heads or odd_dims)
    ) or in_interpreter)
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_interpreter
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(1, 3), num_k_heads=1, num_v_heads=2, k_dim=128, v_dim=128),
        Case(lengths=(2,), num_k_heads=1, num_v_heads=1, k_dim=96, v_dim=192),
        Case(lengths=(2,), num_k_heads=1, num_v_heads=1, k_dim=260, v_dim=20),
    ],
    ids=["qwen3_next", "olmo_hybrid", "blocks_of_four_rows"],
)
def test_blocks_of_a_head_in_interpreter(case: Case):
    check(*GATED, "cpu", make_inputs(case, torch.bfloat16))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    check(*GATED, "cuda", make_inputs(case, dtype))


@needs_cuda
def test_a_captured_graph_serves_other_lengths():
    """Three sequences of a bucket of eight tokens, replayed with other lengths and slots."""
    check_captured(
        *GATED,
        make_inputs(Case(lengths=(1, 1, 1), num_padding_tokens=5)),
        make_inputs(Case(lengths=(4, 0, 3), num_padding_tokens=1), seed=1),
    )


QWEN3_NEXT = {"num_seqs": 64, "num_k_heads": 16, "num_v_heads": 32, "k_dim": 128, "v_dim": 128}
OLMO_HYBRID = {"num_seqs": 64, "num_k_heads": 30, "num_v_heads": 30, "k_dim": 96, "v_dim": 192}
SHAPES = {
    "Qwen3-Next decode 64": Shape(**QWEN3_NEXT, num_tokens=64, dtype=torch.bfloat16),
    "Qwen3-Next decode 64 float32": Shape(**QWEN3_NEXT, num_tokens=64, dtype=torch.float32),
    "Qwen3-Next 4 tokens each": Shape(**QWEN3_NEXT, num_tokens=256, dtype=torch.bfloat16),
    "OLMo-hybrid decode 64": Shape(**OLMO_HYBRID, num_tokens=64, dtype=torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = [
        resources_of(launch, target, label)
        for label, shape in SHAPES.items()
        for target in SHARED_LIMITS
        for launch in record_recurrent(target, shape).values()
    ]
    assert_all_fit(rows, Path(__file__).with_name("resources_gated_recurrent.txt"))
