"""The contract of fused_experts, held by every implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.block_scales import FP8_OPCHECKS
from tests.ops.contract import (
    assert_draws_within_budget,
    assert_within_budget,
    impl_fixture,
    impls_on,
    to_exact,
)
from tests.ops.fused_experts.cases import (
    CASES,
    Case,
    expected_of,
    make_fp8_inputs,
    make_inputs,
    make_integer_inputs,
    make_stored_inputs,
)
from tests.ops.integers import FORMATS, not_finite
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, NO_FEATURES
from torch_hybrid.ops.formats.stored_weights import dequantized, features_of
from torch_hybrid.ops.fused_experts import fused_experts
from torch_hybrid.ops.fused_experts.op import FEATURES, IMPLEMENTATIONS

SILU = {"activation": "silu"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL = Case(num_tokens=5, num_experts=4, dim=24, width=20)
TOKENS = Case(num_tokens=30, num_experts=3, dim=77, width=45)
INVARIANT = impls_on("cpu", IMPLEMENTATIONS, frozenset({BATCH_INVARIANT}))


impl = impl_fixture(IMPLEMENTATIONS, NO_FEATURES)


def run(
    inputs: tuple[Tensor, ...], impl: str, options: Mapping[str, Any] = SILU, **scales: Tensor
) -> Tensor:
    return fused_experts(*inputs, **scales, **options, impl=impl)


@pytest.mark.parametrize("name", CASES)
def test_matches_the_exact_result(impl: str, name: str) -> None:
    options = CASES[name].options()
    inputs = make_inputs(CASES[name])
    exact = expected_of(to_exact(*inputs), **options)
    reference = expected_of(inputs, **options)
    assert_within_budget(run(inputs, impl, options), exact, reference)


def assert_same_bits_in_any_batch(inputs: tuple[Tensor, ...], impl: str, **scales: Tensor) -> None:
    x, ids, factors, *weights = inputs
    whole = run(inputs, impl, **scales)
    for rows in (slice(1), slice(3), slice(4, 27), slice(29, None)):
        some = run((x[rows], ids[rows], factors[rows], *weights), impl, **scales)
        assert torch.equal(some, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_a_token_has_the_same_bits_in_any_batch(impl: str, dtype: str) -> None:
    assert_same_bits_in_any_batch(make_inputs(TOKENS, dtype=DTYPES[dtype]), impl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["fp8", *FORMATS])
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_a_token_of_stored_experts_has_the_same_bits_in_any_batch(
    impl: str, stored: str, dtype: str
) -> None:
    inputs, scales = make_stored_inputs(TOKENS, stored, dtype=DTYPES[dtype])
    assert_same_bits_in_any_batch(inputs, impl, **scales)


def assert_near(actual: Tensor, exact: Tensor) -> None:
    """Within four roundings: the hidden activations are kept in bfloat16, as models keep them."""
    scale = exact.abs().max().item() if exact.numel() else 0.0
    assert ((actual - exact).abs() <= 4 * torch.finfo(torch.bfloat16).eps * scale).all()


@pytest.mark.parametrize("name", CASES)
def test_bfloat16(impl: str, name: str) -> None:
    options = CASES[name].options()
    inputs = make_inputs(CASES[name], dtype=torch.bfloat16)
    exact = expected_of(to_exact(*inputs), **options)
    assert_near(run(inputs, impl, options), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_weights_and_int32_ids(impl: str, dtype: str) -> None:
    x, ids, expert_weights, gate_up, down = make_inputs(CASES["odd_sizes"], dtype=DTYPES[dtype])
    expected = run((x, ids, expert_weights, gate_up, down), impl)
    out = run((x, ids.int(), expert_weights.float(), gate_up, down), impl)
    assert torch.equal(out, expected)


def test_equals_transformers(impl: str) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, ids, expert_weights, gate_up, down = make_inputs(CASES["some_choices_empty"])
    config = modeling.Qwen3NextConfig(num_experts=8, hidden_size=64, moe_intermediate_size=32)
    experts = modeling.Qwen3NextExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(gate_up)
    experts.down_proj = torch.nn.Parameter(down)
    with torch.no_grad():
        expected = experts.double()(x.double(), ids, expert_weights.double())
    out = run((x, ids, expert_weights, gate_up, down), impl)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)


def test_equals_transformers_without_a_gate(impl: str) -> None:
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    x, ids, expert_weights, up, down = make_inputs(CASES["no_gate_prefill"])
    config = modeling.NemotronHConfig(n_routed_experts=8, hidden_size=64, moe_intermediate_size=32)
    experts = modeling.NemotronHExperts(config)
    experts.up_proj, experts.down_proj = torch.nn.Parameter(up), torch.nn.Parameter(down)
    with torch.no_grad():
        expected = experts.double()(x.double(), ids, expert_weights.double())
    out = run((x, ids, expert_weights, up, down), impl, {"activation": "relu2"})
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)


def test_empty_choices_give_exact_zeros(impl: str) -> None:
    inputs = make_inputs(CASES["all_choices_empty"])
    assert torch.equal(run(inputs, impl), torch.zeros(4, 64))


def test_one_expert_twice(impl: str) -> None:
    x, ids, expert_weights, gate_up, down = make_inputs(SMALL)
    ids[:, 1] = ids[:, 0]
    once = expert_weights.clone()
    once[:, 0] += once[:, 1]
    once[:, 1] = 0
    out = run((x, ids, expert_weights, gate_up, down), impl)
    expected = run((x, ids, once, gate_up, down), impl)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_a_token_does_not_see_the_others(impl: str) -> None:
    x, ids, expert_weights, gate_up, down = make_inputs(CASES["prefill"])
    expected = run((x, ids, expert_weights, gate_up, down), impl)
    x[:3], x[4:] = torch.nan, torch.nan
    assert torch.equal(run((x, ids, expert_weights, gate_up, down), impl)[3], expected[3])


def test_an_expert_that_is_not_hit_is_not_read(impl: str) -> None:
    inputs = make_inputs(Case(num_tokens=6, num_experts=4, routing="one"))
    expected = run(inputs, impl)
    inputs[3][:3], inputs[4][:3] = torch.nan, torch.nan
    assert torch.equal(run(inputs, impl), expected)


# ---- weights of 8 bits -----------------------------------------------------------------------


fp8_impl = impl_fixture(IMPLEMENTATIONS, FEATURES)


# Three blocks of either weight's columns, the last one smaller, and gate's last block too.
BLOCKS = Case(num_tokens=20, num_experts=6, dim=300, width=330)


def is_rounded(impl: str, case: Case) -> bool:
    """Whether an implementation rounds tokens, and hidden activations, to 8 bits."""
    return impl == "triton_fp8" and case.num_tokens > 4


@pytest.mark.parametrize("name", [*CASES, "blocks"])
def test_fp8_matches_the_exact_result(fp8_impl: str, name: str) -> None:
    case = {**CASES, "blocks": BLOCKS}[name]
    rounds = is_rounded(fp8_impl, case)
    draws = []
    for seed in range(3):
        inputs, scales = make_fp8_inputs(case, seed=seed)
        out = run(inputs, fp8_impl, case.options(), **scales)
        exact = exact_of(inputs, scales, case.options(), rounds=rounds)
        options = {**case.options(), "rounds": rounds}
        draws.append((out, exact, expected_of(inputs, **scales, **options)))
    if not rounds:  # MKL sums few rows in one chain, and the reference's one in many
        assert_draws_within_budget(draws, factor=4 if fp8_impl == "torch" else 2)
        return
    for out, exact, _ in draws:  # of float32: a hidden activation may lie between two numbers
        assert_near(out, exact)


@pytest.mark.parametrize("name", [*CASES, "blocks"])
def test_fp8_of_bfloat16_tokens(fp8_impl: str, name: str) -> None:
    case = {**CASES, "blocks": BLOCKS}[name]
    inputs, scales = make_fp8_inputs(case, dtype=torch.bfloat16)
    out = run(inputs, fp8_impl, case.options(), **scales)
    if is_rounded(fp8_impl, case):  # what is rounded to 8 bits was rounded to bfloat16 before
        expected = expected_of(inputs, **scales, **case.options(), rounds=True)
        assert_rounds_alike(out.float(), expected.float())
    else:
        assert_near(out, exact_of(inputs, scales, case.options()))


def exact_of(
    inputs: tuple[Tensor, ...],
    scales: dict[str, Tensor],
    options: Mapping[str, Any],
    *,
    rounds: bool = False,
) -> Tensor:
    """The result exactly; with ``rounds`` of tokens and hidden activations in 8 bits."""
    exact_scales = {n: s.double() if s.is_floating_point() else s for n, s in scales.items()}
    x, ids, expert_weights, gate_up, down = inputs
    exact = *to_exact(x, ids, expert_weights), gate_up, down
    return expected_of(exact, **exact_scales, **options, rounds=rounds)


def assert_rounds_alike(actual: Tensor, expected: Tensor) -> None:
    """Within a fiftieth on the whole: what lies between two numbers of 8 bits goes to either."""
    error = (actual - expected).square().mean().sqrt() if actual.numel() else torch.zeros(())
    assert error <= 0.02 * expected.square().mean().sqrt() or not actual.numel(), error
    assert (actual - expected).abs().le(0.08 * expected.abs().max() if actual.numel() else 0).all()


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_a_scale_is_that_of_its_block(fp8_impl: str, num_tokens: int) -> None:
    case = replace(BLOCKS, num_tokens=num_tokens, routing="one")
    inputs, scales = make_fp8_inputs(case)
    expected = run(inputs, fp8_impl, **scales)
    scales["gate_up_scales"][:-1] = torch.nan  # of experts that are not hit
    scales["down_scales"][:-1] = torch.nan
    scales["down_scales"][-1, 1, 2] = torch.nan
    out = run(inputs, fp8_impl, **scales)
    assert out[:, 128:256].isnan().all()
    clean = [*range(128), *range(256, 300)]
    assert torch.equal(out[:, clean], expected[:, clean])


# ---- weights that are integers ---------------------------------------------------------------


def check_takes(impl: str, weight: Tensor) -> None:
    if reasons := IMPLEMENTATIONS[impl].capability.features_refused(features_of(weight.dtype)):
        pytest.skip("; ".join(reasons))


@pytest.fixture(scope="module", params=product([*CASES, "blocks"], FORMATS, DTYPES), ids="-".join)
def exact_call(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    """Inputs, their scales and options, and the exact result, once for all implementations."""
    name, stored, dtype = request.param
    case = {**CASES, "blocks": BLOCKS}[name]
    inputs, scales = make_integer_inputs(case, stored, dtype=DTYPES[dtype])
    return inputs, scales, case.options(), exact_of(inputs, scales, case.options())


def test_integers_are_as_exact_as_what_they_are_worth(
    impl: str, exact_call: tuple[Any, ...]
) -> None:
    inputs, scales, options, exact = exact_call
    check_takes(impl, inputs[3])
    out = run(inputs, impl, options, **scales)
    if out.dtype == torch.bfloat16:
        assert_near(out, exact)
        return
    *tokens, gate_up, down = inputs
    gate_up = dequantized(gate_up, scales["gate_up_scales"], torch.float32)
    down = dequantized(down, scales["down_scales"], torch.float32)
    assert_within_budget(out, exact, run((*tokens, gate_up, down), impl, options))


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("num_tokens", [3, 20])
def test_a_scale_is_that_of_its_expert_and_row(impl: str, num_tokens: int, stored: str) -> None:
    case = replace(BLOCKS, num_tokens=num_tokens, routing="one")
    inputs, scales = make_integer_inputs(case, stored)
    check_takes(impl, inputs[3])
    expected = run(inputs, impl, **scales)
    nan = not_finite(scales["down_scales"], torch.nan)
    scales["gate_up_scales"][:-1] = nan  # of experts that are not hit
    scales["down_scales"][:-1] = nan
    scales["down_scales"][-1, 70] = nan
    out = run(inputs, impl, **scales)
    assert out[:, 70].isnan().all()
    clean = [i for i in range(out.shape[1]) if i != 70]
    assert torch.equal(out[:, clean], expected[:, clean])


# ---- the op as the compiler sees it ----------------------------------------------------------


@pytest.mark.parametrize("name", ["odd_sizes", "no_gate_odd_sizes"])
def test_opcheck_of_fp8(fp8_impl: str, name: str) -> None:
    inputs, scales = make_fp8_inputs(CASES[name])
    op = torch.ops.torch_hybrid.fused_experts.default
    options = {**scales, **CASES[name].options(), "impl": fp8_impl}
    torch.library.opcheck(op, inputs, options, test_utils=FP8_OPCHECKS)


@pytest.mark.parametrize("wrong", [-1, 6])
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("impl", ["cpp"], indirect=True)
def test_ids_out_of_range_are_refused_beside_integers(impl: str, stored: str, wrong: int) -> None:
    """In C++ by a library of its own; beside floats, ``tests/hostile/test_indices.py`` holds it."""
    (x, ids, *others), scales = make_integer_inputs(CASES["odd_sizes"], stored)
    ids[-1, -1] = wrong
    with pytest.raises(ValueError, match=rf"expert_ids must be in \[0, 5\], got {wrong}"):
        run((x, ids, *others), impl, **scales)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", ["odd_sizes", "no_gate_odd_sizes"])
def test_opcheck_of_integers(impl: str, name: str, stored: str) -> None:
    inputs, scales = make_integer_inputs(CASES[name], stored)
    check_takes(impl, inputs[3])
    op = torch.ops.torch_hybrid.fused_experts.default
    options = {**scales, **CASES[name].options(), "impl": impl}
    torch.library.opcheck(op, inputs, options)


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str = "torch", /, **changes: object) -> str:
    names = ("x", "expert_ids", "expert_weights", "gate_up", "down")
    arguments = dict(zip(names, make_inputs(SMALL), strict=True)) | {"activation": "silu"}
    return error_text(ValueError, fused_experts, **{**arguments, **changes}, impl=impl)


def fp8_errors() -> list[str]:
    inputs, scales = make_fp8_inputs(Case(num_tokens=5, num_experts=4, dim=300, width=150))
    names = ("x", "expert_ids", "expert_weights", "gate_up", "down")
    fp8 = dict(zip(names, inputs, strict=True)) | scales
    return [
        failing(**fp8 | {"gate_up_scales": None}),
        failing(**fp8 | {"gate_up_scales": None, "down_scales": None}),
        failing(**fp8 | {"down": inputs[4].float()}),
        failing(**fp8 | {"gate_up_scales": torch.ones(4, 3, 3)}),
        failing(**fp8 | {"down_scales": scales["down_scales"].double()}),
        failing(**fp8 | {"down_scales": torch.ones(4, 2, 3).mT}),
    ]


def integer_errors() -> list[str]:
    inputs, scales = make_integer_inputs(SMALL, "int4_of_32")
    names = ("x", "expert_ids", "expert_weights", "gate_up", "down")
    int4 = dict(zip(names, inputs, strict=True)) | scales
    inputs, scales = make_integer_inputs(SMALL, "int8")
    int8 = dict(zip(names, inputs, strict=True)) | scales
    inputs, scales = make_integer_inputs(SMALL, "mxfp4")
    mxfp4 = dict(zip(names, inputs, strict=True)) | scales
    _, nvfp4 = make_integer_inputs(SMALL, "nvfp4")
    return [
        failing(**int8 | {"down_scales": torch.ones(4, 20)}),
        failing(**int8 | {"down": int4["down"]}),
        failing(**int4 | {"down_scales": torch.ones(4, 32, 2)}),
        failing(**int4 | {"gate_up": int4["gate_up"][..., :12].contiguous()}),
        failing(
            **int4
            | {"gate_up": torch.zeros(4, 80, 16, dtype=torch.uint8)}
            | {"gate_up_scales": torch.ones(4, 80, 1)}
            | {"down": torch.zeros(4, 32, 20, dtype=torch.uint8)}
        ),
        failing(**mxfp4 | {"down_scales": nvfp4["down_scales"]}),
        failing(**mxfp4 | {"gate_up_scales": mxfp4["gate_up_scales"][..., 1:]}),
        failing(**mxfp4 | {"down_scales": mxfp4["down_scales"].float()}),
    ]


def test_is_deterministic(impl: str) -> None:
    inputs = make_inputs(CASES["batch"])
    first = run(inputs, impl)
    assert all(torch.equal(run(inputs, impl), first) for _ in range(5))


def test_error_texts() -> None:
    errors = [
        failing(gate_up=torch.zeros(4, 20, 24)),
        failing(activation="gelu"),
        failing(activation="relu2"),
        failing(activation="relu2", limit=1.0),
        failing(limit=0.0),
        failing(softcaps=[1.0]),
        failing(softcaps=[1.0, 2.0], limit=1.0),
        *fp8_errors(),
        *integer_errors(),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
gate_up must have shape [4, 40, 24], got [4, 20, 24]
activation must be one of ['silu', 'relu2'], got 'gelu'
gate_up must have shape [4, 20, 24], got [4, 40, 24]
limit must be positive and of a gate, got 1.0 and 'relu2'
limit must be positive and of a gate, got 0.0 and 'silu'
softcaps must be two positive numbers, got [1.0]
softcaps must be of a gate without a limit, got limit 1.0
gate_up_scales must be given where the other scales are, got None
gate_up must have dtype torch.float32, got torch.float8_e4m3fn
down must have dtype torch.float8_e4m3fn, got torch.float32
gate_up_scales must have shape [4, 4, 3], got [4, 3, 3]
down_scales must have dtype torch.float32 or torch.uint8, got torch.float64
down_scales must be contiguous, got strides [6, 1, 3]
down_scales must have shape [4, 24], got [4, 20]
down must have shape [4, 24, 16], got [4, 32, 16]
down_scales must have shape [4, 32, 1], or 2 of each with zero points, got [4, 32, 2]
gate_up must have shape [4, 64, 16], got [4, 64, 12]
down_scales: a row of 40 numbers of 4 bits has no whole groups of 32, 64 or 128
gate_up_scales and down_scales must be of MXFP4 or of NVFP4, got both
gate_up_scales must have shape [4, 64, 1] of MXFP4 or [4, 64, 6] of NVFP4, got [4, 64, 0]
down_scales must have dtype torch.uint8, got torch.float32""",
    )
