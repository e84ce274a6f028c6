"""The contract of latent_attention, held by every implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.block_scales import FP8_OPCHECKS
from tests.ops.contract import (
    assert_within_budget,
    impl_fixture,
)
from tests.ops.latent_attention.cases import CASES, Case, Inputs, make_inputs
from tests.ops.paged_contract import PagedContract, bits
from torch_hybrid.ops.latent_attention import (
    latent_attention,
    reference,
)
from torch_hybrid.ops.latent_attention.op import IMPLEMENTATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = Case(num_heads=4, rank=32, rope_dim=16, lengths=((1, 23), (9, 30), (1, 1)))


impl = impl_fixture(IMPLEMENTATIONS)


MAKE = {"as_written": make_inputs, "fp8": partial(make_inputs, fp8=True)}


@pytest.fixture(params=MAKE)
def make(request: pytest.FixtureRequest) -> Callable[..., Inputs]:
    """``make_inputs``, for each way in which latents are kept."""
    return MAKE[request.param]


def attend(inputs: Inputs, impl: str, scale: float = 0.1) -> tuple[Tensor, Tensor]:
    """Output and the pool afterwards."""
    args = inputs.args()
    options = {"scale": scale, "pool_scale": inputs.pool_scale}
    return latent_attention(*args, impl=impl, **options), args[4]


class TestPages(PagedContract):
    implementations, cases, small = IMPLEMENTATIONS, CASES, SMALL
    some = ("deepseek_v2_lite", "odd", "long_decode", "long_extend")

    @staticmethod
    def attend(inputs: Inputs, impl: str) -> tuple[tuple[Tensor, ...], Tensor]:
        out, pool = attend(inputs, impl)
        return (out,), pool


# ---- numbers ---------------------------------------------------------------------------------


@cache
def expected_results(
    name: str, dtype: torch.dtype, make: Callable[..., Inputs]
) -> tuple[Tensor, Tensor]:
    """The reference in float64 and in ``dtype``."""
    return exact_and_rounded(make(CASES[name], dtype=dtype), CASES[name].scale)


def exact_and_rounded(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    inputs = replace(inputs, scale=scale)
    exact = reference.latent_attention(inputs.to(torch.float64).fresh())
    return exact, reference.latent_attention(inputs.fresh())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(impl: str, name: str, dtype: str, make: Callable[..., Inputs]) -> None:
    if DTYPES[dtype] not in IMPLEMENTATIONS[impl].capability.dtypes:
        pytest.skip(f"{impl} has no {dtype}")
    exact, rounded = expected_results(name, DTYPES[dtype], make)
    inputs = make(CASES[name], dtype=DTYPES[dtype])
    assert_within_budget(attend(inputs, impl, CASES[name].scale)[0], exact, rounded)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 7, 8, 15, 16, 17, 24, 33, 48, 64, 65])
def test_any_number_of_heads(impl: str, num_heads: int, make: Callable[..., Inputs]) -> None:
    lengths = ((1, 70), (3, 40), (1, 1), (1, 600))
    case = Case(num_heads=num_heads, rank=48, rope_dim=16, lengths=lengths)
    inputs = make(case)
    exact, rounded = exact_and_rounded(inputs, case.scale)
    assert_within_budget(attend(inputs, impl, case.scale)[0], exact, rounded)


@pytest.mark.parametrize("seq_len", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513])
@pytest.mark.parametrize("num_new", [1, 2, 40])
@pytest.mark.parametrize(
    ("kept", "dtype"), [("as_written", torch.float32), ("fp8", torch.bfloat16)]
)
def test_lengths_around_block_boundaries(
    impl: str, num_new: int, seq_len: int, kept: str, dtype: torch.dtype
) -> None:
    lengths = ((min(num_new, seq_len), seq_len),)
    case = Case(num_heads=3, rank=32, rope_dim=16, lengths=lengths)
    inputs = MAKE[kept](case, dtype=dtype)
    exact, rounded = exact_and_rounded(inputs, 0.1)
    assert_within_budget(attend(inputs, impl)[0], exact, rounded)


def test_weights_are_a_softmax(impl: str) -> None:
    case = Case(num_heads=2, rank=32, rope_dim=16, lengths=((40, 40),))
    inputs = make_inputs(case)
    out, _ = attend(inputs, impl)
    q = torch.cat([inputs.q_latent, inputs.q_rope], 2)
    logits = 0.1 * torch.einsum("thd,sd->ths", q, torch.cat([inputs.latent, inputs.k_rope], 1))
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    logits.masked_fill_(hidden[:, None], -math.inf)
    torch.testing.assert_close(out, logits.softmax(2) @ inputs.latent, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "kimi_linear"])
def test_absorbed_equals_expanded(impl: str, name: str) -> None:
    """``W_UV latent_attention(q_nope W_UK, ...)`` is attention with each head's own k and v."""
    case = CASES[name]
    nope, v_dim, heads = case.nope_dim, 128, case.num_heads
    inputs = make_inputs(replace(case, lengths=((30, 30),)))
    generator = torch.Generator().manual_seed(1)
    q_nope = torch.randn(30, heads, nope, generator=generator)
    W_UK = torch.randn(heads, nope, case.rank, generator=generator) * case.rank**-0.5
    W_UV = torch.randn(heads, v_dim, case.rank, generator=generator) * case.rank**-0.5
    inputs = replace(inputs, q_latent=torch.einsum("thn,hnr->thr", q_nope, W_UK))

    scale = (128 + 64) ** -0.5
    assert case.scale == scale != (case.rank + case.rope_dim) ** -0.5
    out, _ = attend(inputs, impl, scale)
    absorbed = torch.einsum("thr,hvr->thv", out, W_UV)

    k_nope = torch.einsum("tr,hnr->thn", inputs.latent, W_UK)
    k = torch.cat([k_nope, inputs.k_rope[:, None].expand(-1, heads, -1)], 2)
    v = torch.einsum("tr,hvr->thv", inputs.latent, W_UV)
    q = torch.cat([q_nope, inputs.q_rope], 2)
    logits = torch.einsum("thd,shd->ths", q, k) * q.shape[2] ** -0.5
    logits.masked_fill_(torch.ones(30, 30, dtype=torch.bool).triu(1)[:, None], -math.inf)
    expanded = torch.einsum("ths,shv->thv", logits.softmax(2), v)
    torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=1e-4)


def test_large_logits_do_not_overflow(impl: str, make: Callable[..., Inputs]) -> None:
    inputs = make(SMALL)
    out, _ = attend(replace(inputs, q_latent=inputs.q_latent * 1e4), impl)
    assert out.isfinite().all()


def test_scales_of_8_bits_are_any_numbers(impl: str) -> None:
    inputs = make_inputs(CASES["odd"], unused=0.0).in_fp8(1.3)
    own = replace(inputs.fresh(), scale=0.1)
    expected = reference.latent_attention(own)
    out, pool = attend(inputs, impl)
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=1e-5)
    assert torch.equal(bits(pool), bits(own.pool))


# ---- the op as the compiler sees it ----------------------------------------------------------


def test_opcheck_of_fp8(impl: str) -> None:
    op = torch.ops.torch_hybrid.latent_attention.default
    inputs = make_inputs(SMALL, unused=0.0, fp8=True)
    options = {"scale": 0.2, "pool_scale": inputs.pool_scale, "impl": impl}
    torch.library.opcheck(op, inputs.args(), options, test_utils=FP8_OPCHECKS)


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, scale: float = 1.0, **changes: Tensor) -> str:
    inputs = replace(make_inputs(SMALL), **changes)
    options = {"scale": scale, "pool_scale": inputs.pool_scale}
    return error_text(ValueError, latent_attention, *inputs.args(), impl=impl, **options)


def test_strided_rows(impl: str, make: Callable[..., Inputs]) -> None:
    """The layouts a model has: heads first out of a batched product, slices of projections."""
    inputs = make(CASES["deepseek_v2_lite"])
    expected, _ = attend(inputs, impl)
    q_rope = torch.cat([torch.full_like(inputs.q_rope, math.nan), inputs.q_rope], 2)[..., 64:]
    heads_first = inputs.q_latent.transpose(0, 1).contiguous().transpose(0, 1)
    kv_a = torch.cat([inputs.latent, inputs.k_rope], 1)
    strided = replace(
        inputs, q_latent=heads_first, q_rope=q_rope, latent=kv_a[:, :512], k_rope=kv_a[:, 512:]
    )
    assert torch.equal(attend(strided, impl)[0], expected)


def test_error_texts() -> None:
    good = make_inputs(SMALL)
    errors = [
        failing("torch", pool=good.in_fp8().pool),
        failing("torch", pool_scale=good.in_fp8().pool_scale),
        failing("torch", pool=good.in_fp8().pool, pool_scale=torch.ones(2)),
        failing("torch", scale=0.0),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
pool_scale must be given for a pool of torch.float8_e4m3fn
pool_scale must be None for a pool of torch.float32
pool_scale must have shape [1], got [2]
scale must be positive, got 0.0""",
    )
