"""Triton kernels of steps: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.delta_rule import step_gated_cases, step_kimi_cases
from tests.ops.delta_rule.step_cases import Case
from tests.ops.delta_rule.step_family import Family
from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI
from tests.ops.delta_rule.step_triton import (
    check_both_steps_sum_in_one_order,
    check_fit,
    check_rows_are_summed_alike,
)
from tests.ops.step_triton import check, check_captured
from tests.ops.triton_compile import needs_cross_compiler
from tests.ops.triton_interpreter import interprets

# What of the contract the interpreter can do in seconds. It cuts bfloat16 off where a GPU rounds,
# and here numbers are rounded four times, one after the other.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/delta_rule -k "test_step and triton"
CONTRACT = """
    test_step and (
        triton and not triton_invariant and (
            exact and fp32 and not (qwen3_next or kimi_linear or ling_3) or another_slot
            or bits and fp32 and mixed
        ) and not on_a_gpu and not interpreter
        or triton_invariant and (
            exact and fp32 and (three_value_heads or odd_dims and kimi)
            or neighbours and gated or several and fp32 and mixed
        )
    )
"""
test_in_the_interpreter = interprets(CONTRACT)


RULES = {"gated": GATED, "kimi": KIMI}
of_each_rule = pytest.mark.parametrize("rule", RULES)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, id=f"{rule}-{name}")
        for rule, family in RULES.items()
        for name, case in family.cases.items()
    ],
)
def test_on_a_gpu(family: Family, case: Case, dtype: torch.dtype):
    check(family, case, dtype)


@needs_cuda
@of_each_rule
def test_a_captured_graph_serves_other_lengths(rule: str):
    check_captured(RULES[rule])


DECODE = partial(step_gated_cases.case, lengths=(1, 1), k_dim=128, v_dim=128)
QWEN3_NEXT = DECODE(num_k_heads=16, num_v_heads=32)
QWEN3_5 = DECODE(num_k_heads=16, num_v_heads=48)
OLMO_HYBRID = DECODE(num_k_heads=30, num_v_heads=30, k_dim=96, v_dim=192)
HEADS: dict[str, Any] = {"num_heads": 32, "k_dim": 128, "v_dim": 128}
KIMI_LINEAR = step_kimi_cases.case(1, 1, **HEADS)
LING_3 = step_kimi_cases.case(1, 1, **HEADS, gate_lower_bound=-5.0)
LAYERS = {"gated": QWEN3_NEXT, "kimi": KIMI_LINEAR}
SHAPES = {
    "gated": {
        "Qwen3-Next": (QWEN3_NEXT, torch.bfloat16),
        "Qwen3-Next float32": (QWEN3_NEXT, torch.float32),
        "Qwen3.5": (QWEN3_5, torch.bfloat16),
        "OLMo-hybrid": (OLMO_HYBRID, torch.bfloat16),
    },
    "kimi": {
        "Kimi-Linear": (KIMI_LINEAR, torch.bfloat16),
        "Kimi-Linear float32": (KIMI_LINEAR, torch.float32),
        "Ling-3": (LING_3, torch.bfloat16),
    },
}


@needs_cross_compiler
@of_each_rule
def test_compiles_without_spills(rule: str) -> None:
    table = Path(__file__).with_name(f"resources_step_{rule}.txt")
    check_fit(RULES[rule], SHAPES[rule], table)


@needs_cross_compiler
@of_each_rule
def test_rows_are_summed_alike_however_many_a_program_has(rule: str) -> None:
    check_rows_are_summed_alike(RULES[rule], LAYERS[rule])


@needs_cross_compiler
@of_each_rule
def test_both_steps_sum_in_one_order(rule: str) -> None:
    check_both_steps_sum_in_one_order(RULES[rule], LAYERS[rule])
