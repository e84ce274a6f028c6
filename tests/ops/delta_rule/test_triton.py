"""The recurrent kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.delta_rule import gated, kimi
from tests.ops.delta_rule.cases import Case, Inputs
from tests.ops.delta_rule.kernels import Shape, on_meta
from tests.ops.recurrent_triton import check, check_captured
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_at
from torch_hybrid.ops.delta_rule import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference

# What of the contract the interpreter can do in seconds; it takes milliseconds a token and head.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/delta_rule -k triton
CONTRACT = """
    recurrent-triton and (
        exact and (one_token or decode or three_value_heads or odd_dims) or kimi and segments
    ) or test_triton.py and interpreted
"""
test_in_the_interpreter = interprets(CONTRACT)

Rule = tuple[Callable[..., Any], Callable[..., Inputs]]
GATED: Rule = (gated_delta_rule, gated.make_inputs)
KIMI: Rule = (kimi_delta_attention, kimi.make_inputs)
WIDE = {"k_dim": 128, "v_dim": 128}


def check_rule(rule: Rule, case: Case, dtype: torch.dtype, device: str) -> None:
    op, make_inputs = rule
    check(partial(run, op), delta_rule_reference, make_inputs(case, dtype), device)


def run(op: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return op(*inputs.args(), **inputs.options(), impl="recurrent_triton")


@needs_interpreter
@pytest.mark.parametrize(
    ("rule", "case"),
    [
        (GATED, Case(lengths=(1, 3), num_k_heads=1, num_v_heads=2, **WIDE)),
        (GATED, Case(lengths=(2,), num_k_heads=1, num_v_heads=1, k_dim=96, v_dim=192)),
        (GATED, Case(lengths=(2,), num_k_heads=1, num_v_heads=1, k_dim=260, v_dim=20)),
        (KIMI, kimi.case(1, 3, num_heads=1, **WIDE)),
        (KIMI, kimi.case(2, num_heads=1, k_dim=80, v_dim=72)),
        (KIMI, kimi.case(2, num_heads=1, k_dim=260, v_dim=20)),
    ],
    ids=["qwen3_next", "olmo_hybrid", "four_rows", "kimi_linear", "unlike_dims", "kimi_four_rows"],
)
def test_blocks_of_a_head_interpreted(rule: Rule, case: Case):
    check_rule(rule, case, torch.bfloat16, "cpu")


@needs_interpreter
@pytest.mark.parametrize("decay", [0.0, -5.0, -50.0, -torch.inf])
def test_any_decay_interpreted(decay: float):
    inputs = kimi.make_inputs(kimi.case(5, 2, num_heads=1))
    inputs = replace(inputs, g=torch.full_like(inputs.g, decay))
    check(partial(run, kimi_delta_attention), delta_rule_reference, inputs, "cpu")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rule", "case"),
    [
        pytest.param(rule, case, id=f"{rule[0].__name__}-{name}")
        for rule, cases in ((GATED, gated.CASES), (KIMI, kimi.CASES))
        for name, case in cases.items()
    ],
)
def test_on_a_gpu(rule: Rule, case: Case, dtype: torch.dtype):
    check_rule(rule, case, dtype, "cuda")


@needs_cuda
@pytest.mark.parametrize(("rule", "num_k_heads"), [(GATED, 2), (KIMI, 4)], ids=["gated", "kimi"])
def test_a_captured_graph_serves_other_lengths(rule: Rule, num_k_heads: int):
    """Three sequences of a bucket of eight tokens, replayed with other lengths and slots."""
    op, make_inputs = rule
    case = Case(lengths=(1, 1, 1), num_k_heads=num_k_heads, num_padding_tokens=5)
    other = make_inputs(replace(case, lengths=(4, 0, 3), num_padding_tokens=1), seed=1)
    check_captured(partial(run, op), delta_rule_reference, make_inputs(case), [other])


def shapes(layers: dict[str, dict[str, Any]], model: str) -> dict[str, tuple[Shape]]:
    """List decode steps of each layer; of a model, those in float32 and of drafts too."""
    made = {f"{name} decode 64": (64, torch.bfloat16, layer) for name, layer in layers.items()}
    layer = layers[model]
    own = {
        f"{model} decode 64": (64, torch.bfloat16, layer),
        f"{model} decode 64 float32": (64, torch.float32, layer),
        f"{model} 4 tokens each": (256, torch.bfloat16, layer),
    }
    return {
        label: (Shape(num_seqs=64, num_tokens=num_tokens, dtype=dtype, **layer),)
        for label, (num_tokens, dtype, layer) in (own | made).items()
    }


@needs_cross_compiler
@pytest.mark.parametrize(
    ("rule", "layers", "model"),
    [
        (
            "gated",
            {
                "Qwen3-Next": {"num_k_heads": 16, "num_v_heads": 32, **WIDE},
                "OLMo-hybrid": {"num_k_heads": 30, "num_v_heads": 30, "k_dim": 96, "v_dim": 192},
            },
            "Qwen3-Next",
        ),
        (
            "kimi",
            {"Kimi-Linear": {"num_k_heads": 32, "num_v_heads": 32, "channels": True, **WIDE}},
            "Kimi-Linear",
        ),
    ],
    ids=["gated", "kimi"],
)
def test_compiles_without_spills(rule: str, layers: dict[str, Any], model: str) -> None:
    table = Path(__file__).with_name(f"resources_{rule}_recurrent.txt")
    assert_all_fit(resources_at(shapes(layers, model), record_launches), table)


def record_launches(target: str, shape: Shape) -> dict[str, Launch]:
    """Note what the launcher launches for q, k and v that are slices of one projection."""
    from torch_hybrid.ops.delta_rule import _triton

    with launches_on(target) as launches:
        _triton.recurrent_delta_rule(on_meta(shape))
    return launches
