"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import assert_draws_within_budget, assert_within_budget
from tests.ops.integers import FORMATS, without_data
from tests.ops.linear.cases import (
    CASES,
    Case,
    Inputs,
    draws_of_integers,
    make_fp8_inputs,
    make_inputs,
    make_mixed_inputs,
    make_stored_inputs,
)
from tests.ops.linear.test_contract import assert_same_bits_in_any_batch, expected_of
from tests.ops.triton_compile import SHARED_LIMITS, Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.formats.block_scales import DTYPE, num_blocks
from torch_hybrid.ops.linear.by_torch import ALIGNED, empty_columns
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/linear -k triton
CONTRACT = """
    triton and not triton_invariant and (
        exact and (odd or three_rows or thirteen_rows or one_by_one or most_rows or no_)
        or does_not_see and 9-bf16 or infinity or opcheck or 8_bits or of_its_block or beside_those
    )
    or triton_invariant and not integers and exact and (three_rows or no_)
    or triton_invariant and any_batch and (not scales or bf16 and (fp8 or int8 or zeros or nvfp4))
    or triton_invariant and integers and exact and three_rows and (int8 or zeros or nvfp4)
"""
# Merged layers of Qwen3-Next-80B: attention's, the router's with the shared expert's, an output's.
FP8_IMPLS = ("triton", "triton_invariant", "triton_fp8")
REAL = {
    "qkv": (2048, (8192, 512, 512)),
    "router": (2048, (512, 512, 512, 1)),
    "out_proj": (4096, (2048,)),
}
# Of the same model: weights of 8 bits, and how many rows of others stand beside them.
MIXED = {
    "delta_net": (2048, (12288,), (64,)),
    "shared_expert": (2048, (512, 512), (512, 1)),
}


def test_rows_of_several_results_are_aligned() -> None:
    """Not those of one, which readers may want contiguous."""
    x = torch.empty(3, 8)
    assert empty_columns(x, (5, 17)).stride() == (2 * ALIGNED, 1)
    assert empty_columns(x, (5, 17)).shape == (3, 22)
    assert empty_columns(x, (22,)).is_contiguous()


test_in_the_interpreter = interprets(CONTRACT)


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


@needs_cuda
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 65, 301])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_weights_on_a_gpu(name: str, num_rows: int) -> None:
    depth, *widths = MIXED[name]
    case = Case(num_rows=num_rows, depth=depth, widths=sum(widths, ()))
    assert_on_gpu("triton_fp8", make_mixed_inputs(case, dtype=torch.bfloat16))


def assert_on_gpu(impl: str, inputs: Inputs) -> None:
    assert_within_budget(on_gpu(impl, inputs), *expected_of(inputs, impl))


def on_gpu(impl: str, inputs: Inputs) -> Tensor:
    return inputs.on_gpu().run(impl).cpu()


def assert_fp8_as_exact(case: Case, dtype: torch.dtype, impl: str) -> None:
    if (reason := IMPLEMENTATIONS[impl].capability.available()) is not None:
        pytest.skip(reason)
    inputs = make_fp8_inputs(case, dtype=dtype)
    if impl != "triton_fp8" or dtype != torch.float32:
        assert_on_gpu(impl, inputs)
        return
    out, (exact, _) = on_gpu(impl, inputs), expected_of(inputs, impl)
    if out.numel():
        # Tensor cores sum products of FP8 in fewer bits than a float has.
        assert (out.double() - exact).abs().max() <= 2**-11 * exact.abs().max()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("impl", ["triton", "triton_invariant"])
@pytest.mark.parametrize("name", CASES)
def test_integers_on_a_gpu(name: str, impl: str, stored: str, dtype: torch.dtype) -> None:
    draws = draws_of_integers(name, stored, dtype=dtype)
    assert_draws_within_budget([(on_gpu(impl, i), *expected_of(i, impl)) for i in draws])


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    assert_on_gpu("triton", make_inputs(CASES[name], dtype=dtype))


@needs_cuda
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("name", REAL)
def test_real_sizes_on_a_gpu(name: str, num_rows: int) -> None:
    depth, widths = REAL[name]
    case = Case(num_rows=num_rows, depth=depth, widths=widths)
    assert_on_gpu("triton", make_inputs(case, dtype=torch.bfloat16))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REAL)
def test_a_row_has_the_same_bits_in_any_batch_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    depth, widths = REAL[name]
    case = Case(num_rows=1000, depth=depth, widths=widths)  # of each tile, those that few rows have
    assert_same_bits_in_any_batch("triton_invariant", make_inputs(case, dtype=dtype).on_gpu())


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["fp8", *FORMATS])
@pytest.mark.parametrize("name", REAL)
def test_a_row_beside_scales_has_the_same_bits_on_a_gpu(
    name: str, stored: str, dtype: torch.dtype
) -> None:
    depth, widths = REAL[name]
    case = Case(num_rows=300, depth=depth, widths=widths)
    inputs = make_stored_inputs(case, stored, dtype=dtype)
    assert_same_bits_in_any_batch("triton_invariant", inputs.on_gpu())


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.linear import _triton

    rows = []
    cases = ("router", 1), ("router", 8), ("out_proj", 4), ("out_proj", 32)
    for name, num_rows in (*cases, *(("qkv", n) for n in (8, 32, 64))):
        depth, widths = REAL[name]
        for target in SHARED_LIMITS:
            with launches_on(target) as launches:
                _triton.linear(nowhere(num_rows, depth, widths))
            launch = launches["_linear_kernel"]
            rows.append(resources_of(launch, target, f"{name}, {num_rows} rows"))
    depth, widths = REAL["qkv"]
    dtypes = (torch.bfloat16, torch.float32)
    any_rows = [(target, 1000, dtype) for target in SHARED_LIMITS for dtype in dtypes]
    any_rows += [("sm_90", num_rows, torch.bfloat16) for num_rows in (16, 32, 64, 150)]
    for target, num_rows, dtype in any_rows:
        with launches_on(target) as launches:
            _triton.linear(nowhere(num_rows, depth, widths, dtype=dtype), is_invariant=True)
        label = f"qkv of any rows, {num_rows} of {dtype}"
        rows.append(resources_of(launches["_linear_kernel"], target, label))
    for name, num_rows in (*cases, ("qkv", 8), ("qkv", 64), ("out_proj", 1000)):
        for target in SHARED_LIMITS:
            label = f"{name}, {num_rows} rows"
            launches = fp8_launches(target, num_rows, *REAL[name]).values()
            rows += [resources_of(launch, target, label) for launch in launches]
    for stored in ("int8", "int4_of_32", "int4_of_128", "int4_64_zeros", "mxfp4", "nvfp4"):
        for name, num_rows in (*(("qkv", n) for n in (1, 4, 32, 64)), ("out_proj", 1000)):
            launches = integer_launches("sm_90", num_rows, *REAL[name], stored).values()
            label = f"{name} of {stored}, {num_rows} rows"
            rows += [resources_of(launch, "sm_90", label) for launch in launches]
    launches = integer_launches("sm_90", 64, *REAL["out_proj"], "int8").values()
    rows += [resources_of(launch, "sm_90", "out_proj of int8, 64 rows") for launch in launches]
    sizes = *((n, torch.bfloat16) for n in (16, 32, 64, 1000)), (1000, torch.float32)
    for num_rows, dtype in sizes:
        options = {"dtype": dtype, "is_invariant": True}
        label = f"any {num_rows}" if dtype == torch.bfloat16 else "any of float32"
        launches = fp8_launches("sm_90", num_rows, *REAL["qkv"], **options).values()
        rows += [resources_of(launch, "sm_90", f"{label}, fp8") for launch in launches]
        for stored in ("int8", "int4_of_32", "int4_of_128", "int4_64_zeros", "mxfp4", "nvfp4"):
            launches = integer_launches("sm_90", num_rows, *REAL["qkv"], stored, **options).values()
            rows += [resources_of(launch, "sm_90", f"{label}, {stored}") for launch in launches]
    for name, num_rows in (("router", 8), ("qkv", 32), ("out_proj", 64)):
        launches = fp8_launches("sm_90", num_rows, *REAL[name], rounds=True).values()
        label = f"{name}, {num_rows} rounded rows"
        rows += [resources_of(launch, "sm_90", label) for launch in launches]
    for name, num_rows in (("delta_net", 32), ("shared_expert", 1), ("shared_expert", 32)):
        launches = mixed_launches(num_rows, *MIXED[name]).values()
        rows += [resources_of(launch, "sm_90", f"{name}, {num_rows} rows") for launch in launches]
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


def nowhere(
    num_rows: int,
    depth: int,
    widths: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    scale_shapes: Sequence[tuple[int, ...]] = (),
) -> Inputs:
    """Make inputs without data; as many weights as there are scales are ``stored``."""
    shapes = [((n, depth), stored) for n in widths[: len(scale_shapes)]]
    shapes += [((n, depth), dtype) for n in widths[len(scale_shapes) :]]
    return Inputs(
        x=torch.empty(num_rows, depth, dtype=dtype, device="meta"),
        weights=[torch.empty(shape, dtype=own, device="meta") for shape, own in shapes],
        biases=[None] * len(widths),
        scales=[torch.empty(shape, device="meta") for shape in scale_shapes] or None,
    )


def mixed_launches(
    num_rows: int, depth: int, widths: tuple[int, ...], others: tuple[int, ...]
) -> dict[str, Launch]:
    from torch_hybrid.ops.linear import _triton_fp8

    blocks = [(num_blocks(n), num_blocks(depth)) for n in widths]
    inputs = nowhere(num_rows, depth, widths + others, stored=DTYPE, scale_shapes=blocks)
    with launches_on("sm_90") as launches:
        _triton_fp8.rounded_linear(inputs)
    return launches


def integer_launches(
    target: str,
    num_rows: int,
    depth: int,
    widths: tuple[int, ...],
    stored: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    is_invariant: bool = False,
) -> dict[str, Launch]:
    from torch_hybrid.ops.linear import _triton

    weights, scales = zip(*(without_data((n, depth), stored) for n in widths), strict=True)
    inputs = nowhere(num_rows, depth, widths, dtype=dtype)
    inputs = replace(inputs, weights=list(weights), scales=list(scales))
    with launches_on(target) as launches:
        _triton.linear(inputs, is_invariant=is_invariant)
    return launches


def fp8_launches(
    target: str,
    num_rows: int,
    depth: int,
    widths: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.bfloat16,
    rounds: bool = False,
    is_invariant: bool = False,
) -> dict[str, Launch]:
    from torch_hybrid.ops.linear import _triton, _triton_fp8

    blocks = [(num_blocks(n), num_blocks(depth)) for n in widths]
    inputs = nowhere(num_rows, depth, widths, dtype=dtype, stored=DTYPE, scale_shapes=blocks)
    with launches_on(target) as launches:
        if rounds:
            _triton_fp8.rounded_linear(inputs)
        else:
            _triton.linear(inputs, is_invariant=is_invariant)
    return launches
