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

from tests.ops.contract import assert_traces_once, assert_within_budget, impl_fixture
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


@pytest.mark.parametrize("name", ["no_keys", "long"])
def test_padding_changes_nothing(impl: str, name: str, causal: bool) -> None:
    out, lse = attend(make_inputs(CASES[name]), impl, causal)
    padded_out, padded_lse = attend(make_inputs(CASES[name], padding=(5, 4, 3)), impl, causal)
    assert torch.equal(padded_out[:-5], out)
    assert torch.equal(padded_lse[:-5], lse)
    assert not padded_out[-5:].any()
    assert (padded_lse[-5:] == -math.inf).all()


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


def test_strided_rows(impl: str, causal: bool) -> None:
    """k and v as slices of one projection, q out of a product with heads first."""
    inputs = make_inputs(CASES["deepseek_v2_lite"])
    expected, expected_lse = attend(inputs, impl, causal)
    kv = torch.cat([inputs.k, inputs.v], 2)
    heads_first = inputs.q.transpose(0, 1).contiguous().transpose(0, 1)
    strided = replace(inputs, q=heads_first, k=kv[..., :192], v=kv[..., 192:])
    out, lse = attend(strided, impl, causal)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_shared_key_head_by_stride(impl: str, causal: bool) -> None:
    """A key that all heads share may be expanded: stride 0."""
    inputs = make_inputs(replace(SMALL, num_k_heads=4))
    shared = inputs.k[:, :1].expand(-1, 4, -1)
    expected = attend(replace(inputs, k=shared.contiguous()), impl, causal)
    for a, b in zip(attend(replace(inputs, k=shared), impl, causal), expected, strict=True):
        assert torch.equal(a, b)


def test_no_sequence_has_a_query(impl: str, causal: bool) -> None:
    inputs = make_inputs(replace(SMALL, lengths=((0, 4), (0, 0))), padding=(2, 0, 0))
    out, lse = attend(inputs, impl, causal)
    assert not out.any()
    assert (lse == -math.inf).all()


# ---- the op as the compiler sees it ----------------------------------------------------------


def twice(impl: str) -> object:
    def step(*args: Tensor) -> tuple[Tensor, Tensor]:
        """The new tokens, causally, then what they are a prefix of."""
        options = {"scale": 0.2, "impl": impl}
        out, _ = ragged_attention_with_lse(*args, causal=True, **options)
        q, k, v, *index = args
        return ragged_attention_with_lse(q * out.mean(), k, v, *index, causal=False, **options)

    return step


def test_compiles_once(impl: str) -> None:
    # The first batch has no two equal sizes that are not tied to one another.
    first = ((1, 90), (9, 30), (1, 18), (1, 1), (2, 2), (4, 5))
    others = [((1, 23), (9, 30)), ((1, 9), (1, 7), (1, 8), (1, 2)), ((40, 40), (2, 3)) * 3]
    batches = [make_inputs(replace(SMALL, lengths=lengths)).args() for lengths in (first, *others)]
    assert_traces_once(twice(impl), batches)


@pytest.mark.slow
def test_inductor_gives_the_eager_result(impl: str) -> None:
    args = make_inputs(SMALL).args()
    compiled = torch.compile(twice(impl), fullgraph=True)
    torch.testing.assert_close(compiled(*args), twice(impl)(*args))


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, scale: float = 1.0, **changes: Tensor) -> str:
    args = replace(make_inputs(SMALL), **changes).args()
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is what is compared)
        ragged_attention_with_lse(*args, causal=True, scale=scale, impl=impl)
    return str(error.value)


def test_error_texts() -> None:
    good = make_inputs(SMALL)
    errors = [
        failing("torch", q=good.q[0]),
        failing("torch", k=good.k[..., :16]),
        failing("torch", v=good.v[1:]),
        failing("torch", q=good.q[:, :3]),
        failing("torch", q=good.q.int()),
        failing("torch", v=good.v.double()),
        failing("torch", k=good.k.transpose(1, 2).contiguous().transpose(1, 2)),
        failing("torch", cu_seqlens_q=good.cu_seqlens_q.long()),
        failing("torch", cu_seqlens_k=good.cu_seqlens_k[1:]),
        failing("torch", scale=-1.0),
        failing("tpu"),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
q must have 3 dimensions, got 2
k must have shape [54, 2, 32], got [54, 2, 16]
v must have shape [54, 2, 16], got [53, 2, 16]
q heads must be a multiple of the 2 key heads, got 3
q must be a floating point tensor, got torch.int32
v must have dtype torch.float32, got torch.float64
k must have a contiguous last dim, got (64, 1, 2)
cu_seqlens_q must have dtype torch.int32, got torch.int64
cu_seqlens_k must have shape [4], got [3]
scale must be positive, got -1.0
impl must be one of ['cudnn', 'cpp', 'triton', 'flashinfer', 'torch'], got 'tpu'""",
    )


def test_offsets_out_of_range(impl: str) -> None:
    errors = [
        failing(impl, cu_seqlens_q=torch.tensor([0, 1, 10, 12]).int()),
        failing(impl, cu_seqlens_q=torch.tensor([1, 1, 10, 11]).int()),
        failing(impl, cu_seqlens_k=torch.tensor([0, 30, 20, 54]).int()),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
cu_seqlens_q must rise from 0 to at most 11, got [0, 1, 10, 12]
cu_seqlens_q must rise from 0 to at most 11, got [1, 1, 10, 11]
cu_seqlens_k must rise from 0 to at most 54, got [0, 30, 20, 54]""",
    )
