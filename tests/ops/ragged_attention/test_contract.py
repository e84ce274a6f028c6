"""The contract of ragged_attention, held by every implementation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.contract import assert_within_budget, impl_fixture
from tests.ops.pages import offsets
from tests.ops.ragged_attention.cases import CASES, Case, Inputs, make_inputs
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse, reference
from torch_hybrid.ops.ragged_attention.op import IMPLEMENTATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = Case(
    num_heads=4, num_k_heads=2, head_dim=32, v_head_dim=16, lengths=((1, 23), (9, 30), (1, 1))
)
impl = impl_fixture(IMPLEMENTATIONS)


@pytest.fixture(params=[False, True], ids=["all_keys", "causal"])
def causal(request: pytest.FixtureRequest) -> bool:
    return request.param


def attend(inputs: Inputs, impl: str, causal: bool) -> tuple[Tensor, Tensor]:
    return ragged_attention_with_lse(*inputs.args(), causal=causal, scale=inputs.scale, impl=impl)


# ---- numbers ---------------------------------------------------------------------------------


@cache
def expected_results(
    name: str, dtype: torch.dtype, causal: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The reference in float64 and in ``dtype``."""
    inputs = replace(make_inputs(CASES[name], dtype=dtype), causal=causal)
    exact = reference.ragged_attention_with_lse(inputs.exact())
    return exact, reference.ragged_attention_with_lse(inputs)


def assert_as_exact(
    actual: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    rounded: tuple[Tensor, Tensor],
) -> None:
    """Both results within budget; a row without keys is exactly ``(0, -inf)``."""
    empty = exact[1] == -math.inf
    assert torch.equal(actual[1] == -math.inf, empty)
    assert_within_budget(actual[0], exact[0], rounded[0])
    assert_within_budget(actual[1][~empty], exact[1][~empty], rounded[1][~empty])
    assert not actual[0][empty].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(impl: str, name: str, dtype: str, causal: bool) -> None:
    if DTYPES[dtype] not in IMPLEMENTATIONS[impl].capability.dtypes:
        pytest.skip(f"{impl} has no {dtype}")
    actual = attend(make_inputs(CASES[name], dtype=DTYPES[dtype]), impl, causal)
    assert actual[1].dtype == torch.float32
    assert_as_exact(actual, *expected_results(name, DTYPES[dtype], causal))


@pytest.mark.parametrize("num_keys", [1, 2, 7, 8, 9, 63, 64, 65, 130])
@pytest.mark.parametrize("num_queries", [1, 2, 15, 16, 17, 63, 64, 65])
def test_matches_dense_attention(impl: str, num_queries: int, num_keys: int) -> None:
    case = Case(
        num_heads=6,
        num_k_heads=2,
        head_dim=48,
        v_head_dim=32,
        lengths=((num_queries, num_keys),),
    )
    inputs = make_inputs(case)
    out, lse = attend(inputs, impl, False)
    q, k, v = (x.transpose(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v))
    dense = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(out, dense, atol=2e-6, rtol=1e-5)
    logits = q @ k.repeat_interleave(3, 1).transpose(2, 3) * 48**-0.5
    torch.testing.assert_close(lse, logits.exp().sum(3).log()[0].T, atol=2e-6, rtol=1e-5)


def test_large_logits_do_not_overflow(impl: str, causal: bool) -> None:
    inputs = make_inputs(SMALL)
    out, lse = attend(replace(inputs, q=inputs.q * 1e4), impl, causal)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_first_queries_without_keys(impl: str) -> None:
    """More queries than keys, aligned at the end: the first ones see nothing."""
    out, lse = attend(make_inputs(replace(SMALL, lengths=((100, 3), (2, 2)))), impl, True)
    seen = torch.arange(102) >= 97
    assert torch.equal(lse.isfinite(), seen[:, None].expand(-1, 4))
    assert (lse[~seen] == -math.inf).all()
    assert not out[~seen].any()


# ---- what a result may not depend on ---------------------------------------------------------


def test_shared_key_head_by_stride(impl: str, causal: bool) -> None:
    """A key that all heads share may be expanded: stride 0."""
    inputs = make_inputs(replace(SMALL, num_k_heads=4))
    shared = inputs.k[:, :1].expand(-1, 4, -1)
    expected = attend(replace(inputs, k=shared.contiguous()), impl, causal)
    for a, b in zip(attend(replace(inputs, k=shared), impl, causal), expected, strict=True):
        assert torch.equal(a, b)


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, scale: float = 1.0, **changes: Tensor) -> str:
    args = replace(make_inputs(SMALL), **changes).args()
    return error_text(
        ValueError, ragged_attention_with_lse, *args, causal=True, scale=scale, impl=impl
    )


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "no_keys", "long"])
def test_sequences_do_not_depend_on_one_another(impl: str, name: str, causal: bool) -> None:
    """Each sequence alone gives the bits that it gives within the batch, in either order."""
    inputs = make_inputs(CASES[name])
    out, lse = attend(inputs, impl, causal)
    counts = [inputs.cu_seqlens_q.diff().tolist(), inputs.cu_seqlens_k.diff().tolist()]
    rows = [torch.arange(sum(count)).split(count) for count in counts]
    num_seqs = len(counts[0])
    for order in [*([n] for n in range(num_seqs)), list(reversed(range(num_seqs)))]:
        q_rows, k_rows = (torch.cat([own[n] for n in order]) for own in rows)
        part = Inputs(
            q=inputs.q[q_rows],
            k=inputs.k[k_rows],
            v=inputs.v[k_rows],
            cu_seqlens_q=offsets([counts[0][n] for n in order]),
            cu_seqlens_k=offsets([counts[1][n] for n in order]),
            scale=inputs.scale,
        )
        part_out, part_lse = attend(part, impl, causal)
        assert torch.equal(part_out, out[q_rows])
        assert torch.equal(part_lse, lse[q_rows])


def test_error_texts() -> None:
    good = make_inputs(SMALL)
    errors = [
        failing("torch", q=good.q[:, :3]),
        failing("torch", q=good.q.int()),
        failing("torch", scale=-1.0),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
q heads must be a multiple of the 2 key heads, got 3
q must be a floating point tensor, got torch.int32
scale must be positive, got -1.0""",
    )
