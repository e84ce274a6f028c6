"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.delta_rule.step_cases import Case
from tests.ops.delta_rule.step_gated_cases import CASES, case
from tests.ops.delta_rule.step_gated_family import FAMILY
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
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/delta_rule -k "step and gated and triton"
CONTRACT = """
    step and gated and (
        triton and not triton_invariant and (
            exact and fp32 and not qwen3_next or another_slot or bits and fp32 and mixed
        ) and not on_a_gpu and not interpreter
        or triton_invariant and (exact and fp32 and three_value_heads
        or neighbours or several and fp32 and mixed)
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


DECODE = partial(case, lengths=(1, 1), k_dim=128, v_dim=128)
QWEN3_NEXT = DECODE(num_k_heads=16, num_v_heads=32)
QWEN3_5 = DECODE(num_k_heads=16, num_v_heads=48)
OLMO_HYBRID = DECODE(num_k_heads=30, num_v_heads=30, k_dim=96, v_dim=192)
SHAPES = {
    "Qwen3-Next": (QWEN3_NEXT, torch.bfloat16),
    "Qwen3-Next float32": (QWEN3_NEXT, torch.float32),
    "Qwen3.5": (QWEN3_5, torch.bfloat16),
    "OLMo-hybrid": (OLMO_HYBRID, torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    check_fit(FAMILY, SHAPES, Path(__file__).with_name("resources_step_gated.txt"))


@needs_cross_compiler
def test_rows_are_summed_alike_however_many_a_program_has() -> None:
    check_rows_are_summed_alike(FAMILY, QWEN3_NEXT)


@needs_cross_compiler
def test_both_steps_sum_in_one_order() -> None:
    check_both_steps_sum_in_one_order(FAMILY, QWEN3_NEXT)
