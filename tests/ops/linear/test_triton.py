"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.contract import assert_within_budget, rows_apart, to_exact
from tests.ops.integers import FORMATS
from tests.ops.linear.cases import (
    CASES,
    Case,
    make_fp8_inputs,
    make_inputs,
    make_integer_inputs,
)
from tests.ops.linear.test_contract import expected_of
from tests.ops.triton_compile import SHARED_LIMITS, Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.block_scales import DTYPE, num_blocks
from torch_hybrid.ops.linear import linear
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS
from torch_hybrid.ops.linear.reference import linear_reference

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/linear -k triton
CONTRACT = """
    triton and (
        exact and (odd or three_rows or thirteen_rows or one_by_one or most_rows or no_)
        or does_not_see and 9-bf16 or infinity or opcheck or 8_bits or of_its_block
    )
"""
# Merged layers of Qwen3-Next-80B: attention's, the router's with the shared expert's, an output's.
FP8_IMPLS = ("triton", "triton_fp8")
REAL = {
    "qkv": (2048, (8192, 512, 512)),
    "router": (2048, (512, 512, 512, 1)),
    "out_proj": (4096, (2048,)),
}


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
) -> None:
    interpreter.run(record_property, Path(__file__).parent, " ".join(CONTRACT.split()))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", FP8_IMPLS)
@pytest.mark.parametrize("name", CASES)
def test_fp8_on_a_gpu(name: str, impl: str, dtype: torch.dtype) -> None:
    assert_fp8_as_exact(CASES[name], dtype, impl)


@needs_cuda
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 64, 65, 301])
@pytest.mark.parametrize("impl", FP8_IMPLS)
@pytest.mark.parametrize("name", REAL)
def test_fp8_of_real_sizes_on_a_gpu(name: str, impl: str, num_rows: int) -> None:
    depth, widths = REAL[name]
    assert_fp8_as_exact(Case(num_rows=num_rows, depth=depth, widths=widths), torch.bfloat16, impl)


def assert_fp8_as_exact(case: Case, dtype: torch.dtype, impl: str) -> None:
    if (reason := IMPLEMENTATIONS[impl].capability.available()) is not None:
        pytest.skip(reason)
    (x, weights, biases), scales = make_fp8_inputs(case, dtype=dtype)
    out = linear(
        rows_apart(x.cuda()),
        [weight.cuda() for weight in weights],
        [None if bias is None else bias.cuda() for bias in biases],
        scales=[scale.cuda() for scale in scales],
        impl=impl,
    )
    rounds = impl == "triton_fp8"
    exact, reference = expected_of((x, weights, biases), scales, rounds=rounds)
    if rounds and dtype == torch.float32 and out.numel():
        # Tensor cores sum products of 8 bits in fewer bits than a float has.
        error = (out.cpu().double() - exact).abs().max()
        assert error <= 2**-11 * exact.abs().max()
    else:
        assert_within_budget(out.cpu(), exact, reference)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_integers_on_a_gpu(name: str, stored: str, dtype: torch.dtype) -> None:
    (x, weights, biases), scales = make_integer_inputs(CASES[name], stored, dtype=dtype)
    out = linear(
        rows_apart(x.cuda()),
        [weight.cuda() for weight in weights],
        [None if bias is None else bias.cuda() for bias in biases],
        scales=[scale.cuda() for scale in scales],
        impl="triton",
    )
    assert_within_budget(out.cpu(), *expected_of((x, weights, biases), scales))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    assert_as_exact(CASES[name], dtype)


@needs_cuda
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("name", REAL)
def test_real_sizes_on_a_gpu(name: str, num_rows: int) -> None:
    depth, widths = REAL[name]
    assert_as_exact(Case(num_rows=num_rows, depth=depth, widths=widths), torch.bfloat16)


def assert_as_exact(case: Case, dtype: torch.dtype) -> None:
    x, weights, biases = make_inputs(case, dtype=dtype)
    exact = linear_reference(*to_exact(x), to_exact(*weights), to_exact(*biases))
    moved = [None if bias is None else bias.cuda() for bias in biases]
    out = linear(rows_apart(x.cuda()), [w.cuda() for w in weights], moved, impl="triton")
    assert_within_budget(out.cpu(), exact, linear_reference(x, weights, biases))


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.linear import _triton

    rows = []
    cases = ("router", 1), ("router", 8), ("out_proj", 4), ("out_proj", 32)
    for name, num_rows in (*cases, *(("qkv", n) for n in (8, 32, 64))):
        depth, widths = REAL[name]
        for target in SHARED_LIMITS:
            with launches_on(target) as launches:
                _triton.linear(
                    torch.empty(num_rows, depth, dtype=torch.bfloat16, device="meta"),
                    [torch.empty(n, depth, dtype=torch.bfloat16, device="meta") for n in widths],
                    [None] * len(widths),
                )
            launch = launches["_linear_kernel"]
            rows.append(resources_of(launch, target, f"{name}, {num_rows} rows"))
    for name, num_rows in (*cases, ("qkv", 8), ("qkv", 64), ("out_proj", 1000)):
        for target in SHARED_LIMITS:
            label = f"{name}, {num_rows} rows"
            launches = fp8_launches(target, num_rows, *REAL[name]).values()
            rows += [resources_of(launch, target, label) for launch in launches]
    for stored in ("int8", "int4_of_32", "int4_of_128", "int4_64_zeros"):
        for name, num_rows in (*(("qkv", n) for n in (1, 4, 32, 64)), ("out_proj", 1000)):
            launches = integer_launches("sm_90", num_rows, *REAL[name], stored).values()
            label = f"{name} of {stored}, {num_rows} rows"
            rows += [resources_of(launch, "sm_90", label) for launch in launches]
    launches = integer_launches("sm_90", 64, *REAL["out_proj"], "int8").values()
    rows += [resources_of(launch, "sm_90", "out_proj of int8, 64 rows") for launch in launches]
    for name, num_rows in (("router", 8), ("qkv", 32), ("out_proj", 64)):
        launches = fp8_launches("sm_90", num_rows, *REAL[name], rounds=True).values()
        label = f"{name}, {num_rows} rounded rows"
        rows += [resources_of(launch, "sm_90", label) for launch in launches]
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


def integer_launches(
    target: str, num_rows: int, depth: int, widths: tuple[int, ...], stored: str
) -> dict[str, Launch]:
    from torch_hybrid.ops.linear import _triton

    group = FORMATS[stored]
    dtype, width = (torch.int8, depth) if group is None else (torch.uint8, depth // 2)
    pair = (2,) if stored.endswith("zeros") else ()
    shapes = [(n,) if group is None else (n, depth // group, *pair) for n in widths]
    with launches_on(target) as launches:
        _triton.linear(
            torch.empty(num_rows, depth, dtype=torch.bfloat16, device="meta"),
            [torch.empty(n, width, dtype=dtype, device="meta") for n in widths],
            [None] * len(widths),
            scales=[torch.empty(shape, device="meta") for shape in shapes],
        )
    return launches


def fp8_launches(
    target: str, num_rows: int, depth: int, widths: tuple[int, ...], *, rounds: bool = False
) -> dict[str, Launch]:
    from torch_hybrid.ops.linear import _triton, _triton_fp8

    launcher = _triton_fp8.rounded_linear if rounds else _triton.linear

    weights = [torch.empty(n, depth, dtype=DTYPE, device="meta") for n in widths]
    with launches_on(target) as launches:
        launcher(
            torch.empty(num_rows, depth, dtype=torch.bfloat16, device="meta"),
            weights,
            [None] * len(widths),
            scales=[torch.empty(num_blocks(n), num_blocks(depth), device="meta") for n in widths],
        )
    return launches
