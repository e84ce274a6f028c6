"""The contract of route, held by every implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.devices import needs_cuda
from tests.errors import error_text
from tests.ops.contract import impl_fixture, rows_apart
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.route import reference, route
from torch_hybrid.ops.route.op import IMPLEMENTATIONS, Route

DEEPSEEK = {"score": "sigmoid", "epsilon": 1e-20, "scale": 2.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A router of some model."""

    num_experts: int
    k: int
    options: dict[str, Any]
    has_bias: bool = False
    num_tokens: int = 5


CASES = {
    "qwen3_next": Case(num_experts=512, k=10, options={"score": "softmax"}),
    "jamba": Case(num_experts=16, k=2, options={"score": "softmax", "renormalise": False}),
    "kimi_linear": Case(
        num_experts=256,
        k=8,
        options=DEEPSEEK | {"num_groups": 8, "num_best_groups": 4},
        has_bias=True,
    ),
    "one_group": Case(num_experts=96, k=6, options=DEEPSEEK, has_bias=True),
    "odd_groups": Case(
        num_experts=60,
        k=7,
        options={"score": "sigmoid", "num_groups": 5, "num_best_groups": 3, "renormalise": False},
    ),
    "all_of_them": Case(num_experts=4, k=4, options={"score": "softmax"}, num_tokens=1),
    "no_tokens": Case(num_experts=8, k=2, options={"score": "softmax"}, num_tokens=0),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
impl = impl_fixture(IMPLEMENTATIONS)


def make_inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, int]:
    generator = torch.Generator().manual_seed(case.num_experts)
    logits = torch.randn(case.num_tokens, case.num_experts, generator=generator) * 3
    bias = torch.randn(case.num_experts, generator=generator) / 4 if case.has_bias else None
    return logits.to(dtype), bias, case.k


def assert_close(case: Case, found: tuple[Tensor, Tensor], logits: Tensor, bias: Any) -> None:
    """The reference's experts; its weights within float32's rounding, and once that of theirs."""
    weights, ids = found
    assert (weights.shape, ids.shape) == ((case.num_tokens, case.k),) * 2
    assert ids.dtype == torch.int64
    if not case.num_tokens:
        return
    own = None if bias is None else bias.double()
    exact = reference.route(Route(logits.double(), own, case.k, **case.options, impl=""))
    assert torch.equal(ids, exact[1])
    rounding = torch.finfo(weights.dtype)
    eps = max(rounding.eps, 8 * torch.finfo(torch.float32).eps)
    least = rounding.tiny * rounding.eps  # what has fewer bits is that far apart
    torch.testing.assert_close(weights.double(), exact[0], rtol=eps, atol=least)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights(impl: str, name: str, dtype: str) -> None:
    case = CASES[name]
    logits, bias, k = make_inputs(case, DTYPES[dtype])
    found = route(logits, bias, k, **case.options, dtype=DTYPES[dtype], impl=impl)
    assert found[0].dtype == DTYPES[dtype]
    assert_close(case, found, logits, bias)


def test_the_first_of_equal_experts(impl: str) -> None:
    logits = torch.zeros(3, 12)
    weights, ids = route(logits, None, 3, score="softmax", impl=impl)
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert torch.allclose(weights, torch.tensor(1 / 3))
    groups: dict[str, Any] = {"num_groups": 3, "num_best_groups": 2, "score": "sigmoid"}
    logits[0, 8:10] = 1.0
    _, ids = route(logits, None, 5, **groups, impl=impl)
    assert ids.tolist() == [[8, 9, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_experts_that_are_barred_or_not_numbers(impl: str) -> None:
    """Experts come of it whatever logits are: others index weights by them."""
    logits = torch.randn(4, 20)
    logits[0, 3:] = -math.inf
    logits[1, 5] = math.nan
    logits[2] = math.nan
    for score in ("softmax", "sigmoid"):
        weights, ids = route(logits, None, 4, score=score, impl=impl)
        assert ids.min() >= 0
        assert ids.max() < 20
        assert all(len(set(row)) == 4 for row in ids.tolist())
        assert weights[3].isfinite().all()
        assert set(ids[0, :3].tolist()) == {0, 1, 2}


def test_rows_that_lie_apart(impl: str) -> None:
    case = CASES["kimi_linear"]
    logits, bias, k = make_inputs(case, torch.float32)
    assert_close(case, route(rows_apart(logits), bias, k, **case.options, impl=impl), logits, bias)
    columns = logits.t().contiguous().t()
    assert_close(case, route(columns, bias, k, **case.options, impl=impl), logits, bias)


test_in_the_interpreter = interprets("triton")


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    case = CASES[name]
    logits, bias, k = make_inputs(case, torch.float32)
    on_gpu = None if bias is None else bias.cuda()
    weights, ids = route(logits.cuda(), on_gpu, k, **case.options, impl="triton")
    assert_close(case, (weights.cpu(), ids.cpu()), logits, bias)


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.route import _triton

    rows = []
    for name in ("qwen3_next", "kimi_linear"):
        case = CASES[name]
        options = {"dtype": torch.bfloat16, "impl": "triton"} | case.options
        for target in SHARED_LIMITS:
            with launches_on(target) as launches:
                logits = torch.empty(64, case.num_experts, dtype=torch.float32, device="meta")
                bias = logits[0] if case.has_bias else None
                _triton.route(Route(logits, bias, case.k, **options))
            rows.append(resources_of(launches["_route_kernel"], target, name))
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


# ---- the op as the compiler sees it ----------------------------------------------------------


# ---- errors ----------------------------------------------------------------------------------


def test_error_texts() -> None:
    logits, bias = torch.zeros(4, 8), torch.zeros(8)
    calls: list[tuple[Tensor, Tensor | None, int, dict[str, Any]]] = [
        (logits[0], None, 2, {}),
        (logits.int(), None, 2, {}),
        (logits, bias[:7], 2, {}),
        (logits, bias.double(), 2, {}),
        (logits, None, 2, {"score": "relu"}),
        (logits, None, 2, {"dtype": torch.int64}),
        (logits, None, 2, {"num_groups": 3}),
        (logits, None, 2, {"num_groups": 8}),
        (logits, None, 2, {"num_groups": 4, "num_best_groups": 5}),
        (logits, None, 5, {"num_groups": 4, "num_best_groups": 2}),
        (logits, None, 2, {"impl": "tpu"}),
    ]
    default = {"score": "softmax", "impl": "torch"}
    errors = [
        error_text(ValueError, route, given, own, k, **(default | options))
        for given, own, k, options in calls
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
logits must be [T, E] of floating point, got [8] of torch.float32
logits must be [T, E] of floating point, got [4, 8] of torch.int32
bias must have shape [8], got [7]
bias must have dtype torch.float32, got torch.float64
score must be one of ['softmax', 'sigmoid'], got 'relu'
dtype must be float32, bfloat16 or float16, got torch.int64
num_groups must be equal parts of 8 experts, of two at least, got 3
num_groups must be equal parts of 8 experts, of two at least, got 8
num_best_groups must be within 1 and 4, got 5
k must be within 1 and 4, got 5
impl must be one of ['triton', 'torch'], got 'tpu'""",
    )
