"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import assert_within_budget, rows_apart, to_exact
from tests.ops.fused_experts.cases import (
    CASES,
    Case,
    Inputs,
    expected_of,
    make_fp8_inputs,
    make_inputs,
    make_integer_inputs,
    make_stored_inputs,
)
from tests.ops.fused_experts.test_contract import (
    BLOCKS,
    assert_near,
    assert_rounds_alike,
    assert_same_bits_in_any_batch,
    exact_of,
    is_rounded,
)
from tests.ops.integers import FORMATS, without_data
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    launches_on,
    needs_cross_compiler,
    simplified_ir,
)
from tests.ops.triton_interpreter import interprets, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_at, resources_of
from torch_hybrid.ops.formats.block_scales import BLOCK, DTYPE
from torch_hybrid.ops.fused_experts import fused_experts
from torch_hybrid.ops.fused_experts.op import IMPLEMENTATIONS, FusedExperts
from torch_hybrid.ops.triton.devices import runs_gluon

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/fused_experts -k triton
CONTRACT = """
    triton and not triton_invariant and not integer and (
        (exact and not fp8 or bfloat16) and (odd_sizes or some_choices or one_expert or no_tokens)
        or blocks_are or does_not_see or int32 or twice or not_read or empty_choices
        or fp8 and blocks or of_its_block and 3 or opcheck and no_gate
    )
    or triton_invariant and not integer and exact and (some_choices or no_tokens)
    or triton_invariant and any_batch and (not stored or bf16 and (fp8 or int8 or nvfp4))
    or triton_invariant and integers and exact and fp32 and some_choices
        and (int8 or zeros or nvfp4)
    or triton and not triton_invariant and not opcheck
        and integers and odd_sizes and (int8 or int4_64_zeros or fp4) and not no_gate
    or expert_linear and triton and odd_sizes and fp32 and (none or fp8 or int8 or nvfp4)
    or expert_linear and triton and has_the_bits and (none and fp32 or nvfp4 and bf16)
"""
# More experts than a launch has blocks, several blocks of an expert, and blocks of many rows.
WIDE = {
    "many_experts": Case(num_tokens=3, num_experts=300, top_k=10, dim=192, width=136),
    "blocks_of_32": Case(num_tokens=90, num_experts=8, dim=200, width=72),
    "blocks_of_64": Case(num_tokens=200, num_experts=8, routing="some_none"),
    "blocks_of_128": Case(num_tokens=700, num_experts=8, top_k=3, dim=320, width=136),
    "one_for_700": Case(num_tokens=700, num_experts=8, routing="one", activation="relu2"),
    # Enough pairs, and sizes, for the kernels of Hopper: blocks of one to three groups, tiles that
    # reach past the last column, one expert with several blocks and others without any.
    "many_pairs": Case(
        num_tokens=900, num_experts=8, top_k=3, dim=320, width=192, routing="some_none"
    ),
    "many_pairs_of_one": Case(num_tokens=700, dim=192, width=64, routing="one"),
    "many_pairs_no_gate": Case(
        num_tokens=500, dim=192, width=320, routing="some_none", activation="relu2"
    ),
    "real": Case(num_tokens=5, num_experts=64, top_k=8, dim=2048, width=512),
}
# Weights of whole blocks, and of others; enough pairs for the kernels of Hopper.
BLOCKED = {
    "blocks": BLOCKS,
    "one_token": replace(BLOCKS, num_tokens=1),
    "pairs_in_blocks": Case(num_tokens=900, num_experts=8, top_k=3, dim=384, width=256),
    "pairs_in_many_blocks": Case(num_tokens=500, num_experts=8, top_k=3, dim=256, width=896),
    "pairs_in_blocks_of_some": Case(
        num_tokens=500, dim=256, width=384, routing="some_none", activation="relu2"
    ),
}


@needs_interpreter
@pytest.mark.parametrize("block", [16, 64])
def test_blocks_are_those_of_each_expert_in_a_row(block: int) -> None:
    from torch_hybrid.ops.fused_experts._triton_group import cut_blocks, group_pairs

    num_experts, ids = 7, make_inputs(Case(num_tokens=90, num_experts=7, routing="some_none"))[1]
    order, starts = group_pairs(ids, num_experts)
    blocks = cut_blocks(starts, ids.numel(), block).tolist()
    pairs = [(ids.flatten() == expert).nonzero().flatten() for expert in range(num_experts)]
    expected = [(expert, part) for expert, own in enumerate(pairs) for part in own.split(block)]
    for (expert, begin, count, zero), (own, part) in zip(blocks, expected, strict=False):
        assert (expert, zero) == (own, 0)
        assert order[begin : begin + count].tolist() == part.tolist()
    assert len(blocks) >= len(expected)
    assert all(block[0] == num_experts for block in blocks[len(expected) :])


test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*CASES, *WIDE])
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = {**CASES, **WIDE}[name]
    inputs = make_inputs(case, dtype=dtype)
    assert_as_exact(inputs, case.options(), call(on_device(inputs), case.options()))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["triton", "triton_invariant", "triton_fp8"])
@pytest.mark.parametrize("name", [*CASES, *WIDE, *BLOCKED])
def test_fp8_on_a_gpu(name: str, impl: str, dtype: torch.dtype) -> None:
    if (reason := IMPLEMENTATIONS[impl].capability.available()) is not None:
        pytest.skip(reason)
    case = {**CASES, **WIDE, **BLOCKED}[name]
    inputs, scales = make_fp8_inputs(case, dtype=dtype)
    moved = {name: scale.cuda() for name, scale in scales.items()}
    options = {**case.options(), "impl": impl}
    out = fused_experts(*on_device(inputs), **moved, **options).cpu()
    exact = exact_of(inputs, scales, case.options())
    if is_rounded(impl, case):
        options = {**case.options(), "rounds": True}
        expected = expected_of(inputs, **scales, **options)
        assert_rounds_alike(out.float(), expected.float())
    elif dtype == torch.float32:
        reference = expected_of(inputs, **scales, **case.options())
        assert_within_budget(out, exact, reference)
    else:
        assert_near(out, exact)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("impl", ["triton", "triton_invariant"])
@pytest.mark.parametrize("name", [*CASES, *WIDE])
def test_integers_on_a_gpu(name: str, impl: str, stored: str, dtype: torch.dtype) -> None:
    case = {**CASES, **WIDE}[name]
    inputs, scales = make_integer_inputs(case, stored, dtype=dtype)
    moved = {name: scale.cuda() for name, scale in scales.items()}
    options = {**case.options(), "impl": impl}
    out = fused_experts(*on_device(inputs), **moved, **options).cpu()
    exact = exact_of(inputs, scales, case.options())
    if dtype == torch.float32:
        reference = expected_of(inputs, **scales, **case.options())
        assert_within_budget(out, exact, reference)
    else:
        assert_near(out, exact)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["one_expert_for_all", "many_pairs_of_one"])
def test_a_captured_graph_serves_other_choices(name: str, dtype: torch.dtype) -> None:
    case = {**CASES, **WIDE}[name]
    captured = on_device(make_inputs(case, dtype=dtype))
    call(captured, case.options())  # compiles the kernels, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(captured, case.options())
    for seed, routing in enumerate(("spread", "none", "some_none"), 1):
        other = make_inputs(replace(case, routing=routing), dtype=dtype, seed=seed)
        for static, tensor in zip(captured, other, strict=True):
            static.copy_(tensor)
        graph.replay()
        assert_as_exact(other, case.options(), out)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["floats", "fp8", *FORMATS])
def test_a_token_has_the_same_bits_in_any_batch_on_a_gpu(stored: str, dtype: torch.dtype) -> None:
    case = Case(num_tokens=300, num_experts=32, top_k=8, dim=512, width=256)
    if stored == "floats":
        inputs, scales = make_inputs(case, dtype=dtype), dict[str, Tensor]()
    else:
        inputs, scales = make_stored_inputs(case, stored, dtype=dtype)
    scales = {name: scale.cuda() for name, scale in scales.items()}
    inputs = tuple(each.cuda() for each in inputs)
    assert_same_bits_in_any_batch(inputs, "triton_invariant", **scales)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["many_pairs", "many_pairs_of_one", "many_pairs_no_gate"])
def test_the_kernels_of_hopper_take_many_pairs(name: str, dtype: torch.dtype) -> None:
    """What ``test_on_a_gpu`` compares is theirs; and no order in which programs run shows."""
    from torch_hybrid.ops.fused_experts import _triton

    if not runs_gluon(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU and triton 3.6 or 3.7")
    case = WIDE[name]
    inputs = on_device(make_inputs(case, dtype=dtype))
    own = _triton.hopper_products
    with mock.patch.object(_triton, "hopper_products", wraps=own) as taken:
        first, second = (call(inputs, case.options()) for _ in range(2))
    assert taken.call_count == 2
    assert torch.equal(first, second)


def call(inputs: Inputs, options: Mapping[str, Any]) -> Tensor:
    return fused_experts(*inputs, **options, impl="triton")


def assert_as_exact(inputs: Inputs, options: Mapping[str, Any], out: Tensor) -> None:
    """Within budget in float32; else as near as hidden activations of x's dtype allow."""
    exact = expected_of(to_exact(*inputs), **options)
    if out.dtype == torch.float32:
        reference = expected_of(inputs, **options)
        assert_within_budget(out.cpu(), exact, reference)
    else:
        assert_near(out.cpu(), exact)


def on_device(inputs: Inputs) -> Inputs:
    """Copies on the GPU; rows of x stay parts of wider ones."""
    x, *others = (tensor.to("cuda", copy=True) for tensor in inputs)
    return rows_apart(x), *others


# (tokens, experts, top k, dim, width, activation, dtype)
SHAPES = {
    "Qwen3-Next 1": (1, 512, 10, 2048, 512, "silu", torch.bfloat16),
    "Qwen3-Next 8": (8, 512, 10, 2048, 512, "silu", torch.bfloat16),
    "Qwen3-Next 512": (512, 512, 10, 2048, 512, "silu", torch.bfloat16),
    "Qwen3-Next 4096": (4096, 512, 10, 2048, 512, "silu", torch.bfloat16),
    "odd 4096": (4096, 128, 8, 2048, 760, "silu", torch.bfloat16),
    "Qwen3-Next 1 float32": (1, 512, 10, 2048, 512, "silu", torch.float32),
    "Nemotron-H 4096": (4096, 128, 6, 2688, 1856, "relu2", torch.bfloat16),
    "Qwen3-Next 64 float32": (64, 512, 10, 2048, 512, "silu", torch.float32),
}


@needs_triton
def test_what_hopper_kernels_take() -> None:
    """All else goes to the other kernels: it would be read or written beside what is meant."""
    from torch_hybrid.ops.fused_experts import _hopper

    def suits(
        top_k: int = 10, dim: int = 192, width: int = 64, limit: float | None = None, **changes: Any
    ) -> bool:
        like = {"device": "meta", "dtype": torch.bfloat16} | changes
        x = torch.empty(100, dim + 16, **like)[:, :dim]
        ids, weights = torch.empty(100, top_k, dtype=torch.int64), torch.empty(100, top_k)
        gate_up, down = torch.empty(8, 2 * width, dim, **like), torch.empty(8, dim, width, **like)
        options = {"activation": "silu", "limit": limit, "impl": "triton"}
        return _hopper.suits(FusedExperts(x, ids, weights, gate_up, down, **options))

    assert not suits()
    with mock.patch.object(_hopper, "runs_gluon", return_value=True):
        assert suits()
        assert suits(dtype=torch.float16)
        refused = (
            suits(top_k=1),
            suits(limit=1.0),
            suits(dim=200),
            suits(width=72),
            suits(dtype=torch.float32),
        )
    assert not any(refused)


@needs_triton
def test_rows_of_weights_are_permuted_as_threads_hold_columns() -> None:
    """What a thread's 8 columns of a product come from lies side by side in memory."""
    from torch_hybrid.ops.fused_experts import _hopper, _hopper_kernels

    weights = torch.arange(2 * 64 * 64).view(2, 64, 64).to(torch.bfloat16)
    described = _hopper._weights(weights, _hopper_kernels)
    rows = torch.arange(2 * 64 * 64).as_strided(described.shape, described.strides)[..., 0] // 64
    # Thread q of a row holds columns 8 i + 2 q + b of a product: these rows in shared memory.
    held = rows.reshape(4, 4, 4, 2).permute(0, 2, 1, 3)  # n, q, i, b
    assert torch.equal(held.flatten(), torch.arange(128))
    assert described.block_shape == [_hopper_kernels.HALF // 32, 4, 4, 2, _hopper_kernels.DEPTH]


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = resources_at(SHAPES, record_launches)
    inkling2 = (384, 8, 4608, 2304, "silu", torch.bfloat16, (4.0, 25.0))
    rows += [
        resources_of(launch, "sm_90", f"Inkling-2 {num_tokens}")
        for num_tokens in (1, 4096)
        for launch in record_launches("sm_90", num_tokens, *inkling2).values()
    ]
    rows += [
        resources_of(launch, target, f"Qwen3-Next {num_tokens}, 8 bits{of_down(launch)}")
        for num_tokens in (1, 8, 512)
        for target in SHARED_LIMITS
        for launch in record_fp8_launches(target, num_tokens).values()
    ]
    rows += [
        resources_of(launch, "sm_90", f"Qwen3-Next {num_tokens}, rounded{of_down(launch)}")
        for num_tokens in (1, 32, 512, 4096)
        for launch in record_fp8_launches("sm_90", num_tokens, rounds=True).values()
    ]
    rows += [
        resources_of(launch, "sm_90", f"wide 4096, rounded{of_down(launch)}")
        for launch in record_fp8_launches("sm_90", 4096, width=1024, rounds=True).values()
    ]
    rows += [
        resources_of(launch, "sm_90", f"Qwen3-Next {num_tokens}, {stored}{of_down(launch)}")
        for stored in ("int8", "int4_of_32", "int4_of_128", "int4_64_zeros", "mxfp4", "nvfp4")
        for num_tokens in (1, 32, 4096)
        for launch in record_integer_launches("sm_90", num_tokens, stored).values()
    ]
    rows += [
        resources_of(launch, "sm_90", f"any number, 8 bits{of_down(launch)}")
        for launch in record_fp8_launches("sm_90", 1, is_invariant=True).values()
    ]
    rows += [
        resources_of(launch, "sm_90", f"any number, {stored}{of_down(launch)}")
        for stored in ("int8", "int4_of_32", "int4_of_128", "int4_64_zeros", "mxfp4", "nvfp4")
        for launch in record_integer_launches("sm_90", 1, stored, is_invariant=True).values()
    ]
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))
    for row in rows:
        kernel = row.kernel.removeprefix("hopper_").removeprefix("fp8_")
        multiplies = kernel.startswith(("gate_up", "down", "scaled"))
        assert (row.products != "-") == (multiplies and "float32" not in row.kernel), row


def of_down(launch: Launch) -> str:
    """Ends the label of the second product, where one kernel computes both."""
    return ", down" * (launch.kwargs.get("ACTIVATES") is False)


def record_launches(
    target: str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    dim: int,
    width: int,
    activation: str,
    dtype: torch.dtype,
    softcaps: tuple[float, float] | None = None,
) -> dict[str, Launch]:
    """What the launcher launches, by kernel."""
    from torch_hybrid.ops.fused_experts import _triton

    def weights(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device="meta")
    rows = (1 + (activation == "silu")) * width
    with launches_on(target) as launches:
        x = FusedExperts(
            weights(num_tokens, dim),
            ids,
            weights(num_tokens, top_k),
            weights(num_experts, rows, dim),
            weights(num_experts, dim, width),
            activation=activation,
            softcaps=softcaps,
            impl="triton",
        )
        _triton.fused_experts(x)
    return launches


def record_fp8_launches(
    target: str,
    num_tokens: int,
    *,
    width: int = 512,
    rounds: bool = False,
    is_invariant: bool = False,
) -> dict[str, Launch]:
    """The same of Qwen3-Next's experts in 8 bits, or of wider ones."""
    from torch_hybrid.ops.fused_experts import _triton

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    with launches_on(target) as launches:
        x = FusedExperts(
            empty(num_tokens, 2048),
            empty(num_tokens, 10, dtype=torch.int64),
            empty(num_tokens, 10),
            empty(512, 2 * width, 2048, dtype=DTYPE),
            empty(512, 2048, width, dtype=DTYPE),
            gate_up_scales=empty(512, 2 * width // BLOCK, 2048 // BLOCK, dtype=torch.float32),
            down_scales=empty(512, 2048 // BLOCK, width // BLOCK, dtype=torch.float32),
            activation="silu",
            impl="triton_fp8" if rounds else "triton",
        )
        if rounds:
            _triton.rounded_experts(x)
        else:
            _triton.fused_experts(x, is_invariant=is_invariant)
    return of_weights(launches)


def of_weights(launches: Mapping[str, Launch]) -> dict[str, Launch]:
    """Those that read weights with scales."""
    readers = ("fp8", "scaled", "_hidden_kernel", "_out_kernel")
    return {name: launches[name] for name in launches if any(map(name.__contains__, readers))}


@needs_cross_compiler
def test_float32_sums_beside_integers_are_of_one_tile_each() -> None:
    """What simplifies IR makes no long sum of them, whose roundings would add up."""
    for launch in record_integer_launches("sm_90", 64, "int8", torch.float32).values():
        begun = re.findall(r"tt\.dot %\S+, %\S+, (%\w+)", simplified_ir(launch, "sm_90"))
        assert begun
        assert all(name.startswith("%cst") for name in begun)


def record_integer_launches(
    target: str,
    num_tokens: int,
    stored: str,
    x_dtype: torch.dtype = torch.bfloat16,
    *,
    is_invariant: bool = False,
) -> dict[str, Launch]:
    """The same of Qwen3-Next's experts as integers."""
    from torch_hybrid.ops.fused_experts import _triton

    def empty(*shape: int, dtype: torch.dtype = x_dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    gate_up, gate_up_scales = without_data((512, 1024, 2048), stored)
    down, down_scales = without_data((512, 2048, 512), stored)
    with launches_on(target) as launches:
        x = FusedExperts(
            empty(num_tokens, 2048),
            empty(num_tokens, 10, dtype=torch.int64),
            empty(num_tokens, 10),
            gate_up,
            down,
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
            activation="silu",
            impl="triton",
        )
        _triton.fused_experts(x, is_invariant=is_invariant)
    return of_weights(launches)
