"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.head_linear.test_contract import assert_same_bits_in_any_batch, inputs
from tests.ops.triton_compile import SHARED_LIMITS, Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.head_linear import head_linear, reference
from torch_hybrid.ops.head_linear.op import HeadLinear

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/head_linear -k triton
# It cuts what it stores in bfloat16, where a GPU rounds.
CONTRACT = """
    triton and (float64 and (9- or 0-) and not 130 or has_alone and bf16 or rounded_once and fp32)
"""
# Heads, rows and depth of DeepSeek-V3's absorbed projections, by whether weights are transposed.
REAL = {True: (128, 512, 128), False: (128, 128, 512)}
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 130])
def test_on_a_gpu(num_tokens: int, is_transposed: bool, dtype: torch.dtype) -> None:
    x, weight = inputs(num_tokens, is_transposed=is_transposed, dtype=dtype)
    rounding = torch.finfo(dtype).eps * x.shape[2] ** 0.5
    for bias in (None, weight[..., 0].contiguous()):
        exact = None if bias is None else bias.double()
        call = HeadLinear(x.double(), weight.double(), bias=exact, impl="")
        given = None if bias is None else bias.cuda()
        out = head_linear(x.cuda(), weight.cuda(), bias=given, impl="triton")
        expected = reference.head_linear(call)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=4 * rounding)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_token_has_its_bits_alone_on_a_gpu(is_transposed: bool, dtype: torch.dtype) -> None:
    x, weight = inputs(300, is_transposed=is_transposed, dtype=dtype)
    assert_same_bits_in_any_batch(x.cuda(), weight.cuda(), "triton")


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = [
        resources_of(launch, target, f"{'keys' if is_transposed else 'values'}, {dtype}")
        for is_transposed in REAL
        for dtype in (torch.bfloat16, torch.float32)
        for target in SHARED_LIMITS
        for launch in record_launches(target, is_transposed, dtype).values()
    ]
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


def record_launches(target: str, is_transposed: bool, dtype: torch.dtype) -> dict[str, Launch]:
    from torch_hybrid.ops.head_linear import _triton

    heads, rows, depth = REAL[is_transposed]
    weight = torch.empty(heads, rows, depth, dtype=dtype, device="meta")
    if is_transposed:
        weight = torch.empty(heads, depth, rows, dtype=dtype, device="meta").transpose(1, 2)
    with launches_on(target) as launches:
        _triton.head_linear(HeadLinear(weight.new_empty(1000, heads, depth), weight, impl="triton"))
    return launches
