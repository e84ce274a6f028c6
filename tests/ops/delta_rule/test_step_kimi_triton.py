"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.delta_rule.step_cases import Case
from tests.ops.delta_rule.step_kimi_cases import CASES, case
from tests.ops.delta_rule.step_kimi_family import FAMILY
from tests.ops.delta_rule.step_triton import (
    check_both_steps_sum_in_one_order,
    check_fit,
    check_rows_are_summed_alike,
)
from tests.ops.step_triton import check, check_captured
from tests.ops.triton_compile import needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_triton

# What of the contract the interpreter can do in seconds. It cuts bfloat16 off where a GPU rounds,
# and here numbers are rounded four times, one after the other.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/delta_rule -k "step and kimi and triton"
CONTRACT = """
    step and kimi and (
        triton and not triton_invariant and (
            exact and fp32 and not (kimi_linear or ling_3) or another_slot
            or bits and fp32 and mixed
        ) and not on_a_gpu and not interpreter
        or triton_invariant and (
            exact and fp32 and odd_dims or several and fp32 and mixed
        )
    )
"""


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__).parent, " ".join(CONTRACT.split()))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    check(FAMILY, case, dtype)


@needs_cuda
def test_a_captured_graph_serves_other_lengths():
    check_captured(FAMILY)


HEADS = {"num_heads": 32, "k_dim": 128, "v_dim": 128}
KIMI_LINEAR = case(1, 1, **HEADS)
LING_3 = case(1, 1, **HEADS, gate_lower_bound=-5.0)
SHAPES = {
    "Kimi-Linear": (KIMI_LINEAR, torch.bfloat16),
    "Kimi-Linear float32": (KIMI_LINEAR, torch.float32),
    "Ling-3": (LING_3, torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    check_fit(FAMILY, SHAPES, Path(__file__).with_name("resources_step_kimi.txt"))


@needs_cross_compiler
def test_rows_are_summed_alike_however_many_a_program_has() -> None:
    check_rows_are_summed_alike(FAMILY, KIMI_LINEAR)


@needs_cross_compiler
def test_both_steps_sum_in_one_order() -> None:
    check_both_steps_sum_in_one_order(FAMILY, KIMI_LINEAR)
