"""The contract of lora, held by every implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import (
    assert_same_bits,
    assert_within_budget,
    impl_fixture,
    impls_on,
    to_exact,
)
from tests.ops.lora.cases import CASES, Case, make_inputs, tensors
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.core.capability import BATCH_INVARIANT
from torch_hybrid.ops.lora import lora, reference
from torch_hybrid.ops.lora.op import IMPLEMENTATIONS, Lora

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INVARIANT = impls_on("cpu", IMPLEMENTATIONS, frozenset({BATCH_INVARIANT}))
impl = impl_fixture(IMPLEMENTATIONS)


def changed_rows(call: Lora) -> list[bool]:
    return [bool(slot and call.ranks[slot - 1].any()) for slot in call.slots.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_matches_float64(impl: str, case: str, dtype: str) -> None:
    call = make_inputs(CASES[case], dtype=DTYPES[dtype])
    exact = reference.lora(Lora(*to_exact(*tensors(call)), impl=""))  # type: ignore[arg-type]
    out = lora(*tensors(call), impl=impl)
    assert out.dtype == call.base.dtype
    assert_within_budget(out, exact, reference.lora(call))
    for t, is_changed in enumerate(changed_rows(call)):
        assert torch.equal(out[t], call.base[t]) != is_changed


def test_the_reference_adds_what_linear_layers_compute() -> None:
    call = make_inputs(CASES["large_rank"])
    added = F.linear(F.linear(call.x, call.a[0, 0]), call.b[0].T)
    torch.testing.assert_close(reference.lora(call), call.base + added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["decode", "parts", "prompt"])
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_a_row_has_the_bits_that_it_has_alone(impl: str, case: str, dtype: str) -> None:
    assert_same_bits_alone(make_inputs(CASES[case], dtype=DTYPES[dtype]), impl)


def assert_same_bits_alone(call: Lora, impl: str) -> None:
    base, x, *factors, slots = tensors(call)
    whole = lora(base, x, *factors, slots, impl=impl)
    for rows in (slice(1), slice(1, 2), slice(3, None)):
        alone = lora(base[rows], x[rows], *factors, slots[rows], impl=impl)
        assert_same_bits(alone, whole[rows])


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("x", torch.zeros(5, 60), r"a must have shape \[3, 1, 8, 60\]"),
        ("b", torch.zeros(3, 8, 95), r"b must have shape \[3, 8, 96\]"),
        ("slots", torch.tensor([4, 0, 0, 0, 0]).int(), "slots must be within 0 and 3, got 0 to 4"),
        ("ranks", torch.tensor([[9], [0], [0]]).int(), "ranks must be within 0 and 8"),
        ("starts", torch.tensor([0, 95]).int(), r"starts must ascend from 0 to 96, got \[0, 95\]"),
    ],
)
def test_refusals(impl: str, field: str, value: Tensor, told: str) -> None:
    call: Any = make_inputs(CASES["decode"])
    setattr(call, field, value)
    with pytest.raises(ValueError, match=told):
        lora(*tensors(call), impl=impl)


# What of the contract the interpreter can do in seconds.
test_in_the_interpreter = interprets(
    "triton and (float64 and fp32 and not prompt and not large or has_the_bits and parts and fp32)"
)


@needs_cuda
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    call = make_inputs(CASES[case], dtype=dtype)
    exact = reference.lora(Lora(*to_exact(*tensors(call)), impl=""))  # type: ignore[arg-type]
    on_gpu = [tensor.cuda() for tensor in tensors(call)]
    out = lora(*on_gpu, impl="triton")
    assert_within_budget(out.cpu(), exact, reference.lora(call))
    if len(call.slots) > 3:
        assert_same_bits_alone(Lora(*on_gpu, impl=""), "triton")


# Qwen3-Next's merged projection of a linear layer, 32 sequences of 8 adapters.
REAL = Case(
    slots=tuple(1 + i % 8 for i in range(32)),
    depth=2048,
    widths=(12288, 64),
    ranks=((16, 16),) * 8,
    rank=16,
)


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.lora import _triton

    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        call = Lora(*(t.to("meta") for t in tensors(make_inputs(REAL, dtype=dtype))), impl="triton")
        for target in SHARED_LIMITS:
            with launches_on(target) as launches:
                _triton.lora(call)
            rows += [resources_of(each, target, str(dtype)) for each in launches.values()]
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))
