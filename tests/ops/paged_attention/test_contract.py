"""The contract of paged_attention, held by every implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.block_scales import FP8_OPCHECKS
from tests.ops.contract import (
    assert_within_budget,
    impl_fixture,
)
from tests.ops.paged_attention.cases import (
    CASES,
    OPTIONS,
    TENSORS,
    Case,
    Inputs,
    hide_what_is_before,
    make_biases,
    make_inputs,
)
from tests.ops.paged_contract import PagedContract, bits
from tests.ops.pages import slots_of
from torch_hybrid.ops.paged_attention import paged_attention, paged_attention_with_lse, reference
from torch_hybrid.ops.paged_attention.op import IMPLEMENTATIONS, RELATIVE_BIAS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = Case(num_q_heads=4, num_kv_heads=2, head_dim=32, lengths=((1, 23), (9, 30), (1, 1)))


impl = impl_fixture(IMPLEMENTATIONS)


MAKE = {"as_written": make_inputs, "fp8": partial(make_inputs, fp8=True)}


@pytest.fixture(params=MAKE)
def make(request: pytest.FixtureRequest) -> Callable[..., Inputs]:
    """``make_inputs``, for each way in which keys and values are kept."""
    return MAKE[request.param]


def attend(inputs: Inputs, impl: str, **options: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and the pool afterwards."""
    args = inputs.args()
    scale = inputs.q.shape[-1] ** -0.5
    options = {"scale": scale, "kv_scales": inputs.kv_scales, **options}
    out, lse = paged_attention_with_lse(*args, impl=impl, **options)
    return out, lse, args[3]


class TestPages(PagedContract):
    implementations, cases, options, nothing = IMPLEMENTATIONS, CASES, OPTIONS, (0, -math.inf)
    some = ("qwen3_next", "odd", "long_decode", "long_extend")
    small = replace(SMALL, num_kv_heads=1)

    @staticmethod
    def attend(inputs: Inputs, impl: str, **options: float) -> tuple[tuple[Tensor, ...], Tensor]:
        *results, pool = attend(inputs, impl, **options)
        return tuple(results), pool


# ---- numbers ---------------------------------------------------------------------------------


@cache
def expected_results(
    name: str, dtype: torch.dtype, options: str, make: Callable[..., Inputs]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The reference in float64 and in ``dtype``."""
    inputs = make(CASES[name], dtype=dtype)
    hide_what_is_before(OPTIONS[options]["window"], inputs)
    inputs = replace(inputs, **OPTIONS[options])
    exact = reference.paged_attention_with_lse(inputs.to(torch.float64).fresh())
    return exact, reference.paged_attention_with_lse(inputs.fresh())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(
    impl: str, name: str, dtype: str, options: str, make: Callable[..., Inputs]
) -> None:
    if DTYPES[dtype] not in IMPLEMENTATIONS[impl].capability.dtypes:
        pytest.skip(f"{impl} has no {dtype}")
    exact, rounded = expected_results(name, DTYPES[dtype], options, make)
    inputs = make(CASES[name], dtype=DTYPES[dtype])
    hide_what_is_before(OPTIONS[options]["window"], inputs)
    out, lse, _ = attend(inputs, impl, **OPTIONS[options])
    assert_within_budget(out, exact[0], rounded[0])
    assert_within_budget(lse, exact[1], rounded[1])
    assert lse.dtype == torch.float32
    chosen = {"scale": CASES[name].head_dim ** -0.5, "kv_scales": inputs.kv_scales}
    alone = paged_attention(*inputs.args(), impl=impl, **chosen, **OPTIONS[options])
    assert torch.equal(out, alone)


@pytest.mark.parametrize("seq_len", [1, 2, 63, 64, 65, 130])
def test_matches_dense_attention(impl: str, seq_len: int) -> None:
    case = Case(num_q_heads=6, num_kv_heads=2, head_dim=48, lengths=((seq_len, seq_len),))
    inputs = make_inputs(case)
    out, lse, _ = attend(inputs, impl)
    q, k, v = (x.transpose(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, dense[0].transpose(0, 1), atol=2e-6, rtol=1e-5)
    logits = q @ k.repeat_interleave(3, 1).transpose(2, 3) * 48**-0.5
    hidden = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    dense_lse = logits.masked_fill(hidden, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, dense_lse[0].T, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"), [(h, 1) for h in (1, 2, 3, 4, 5, 6, 7, 8, 12, 20)] + [(9, 9)]
)
def test_any_number_of_heads(
    impl: str, num_q_heads: int, num_kv_heads: int, make: Callable[..., Inputs]
) -> None:
    case = Case(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        lengths=((1, 70), (3, 40), (1, 1), (1, 600)),
    )
    inputs = make(case)
    exact, _ = reference.paged_attention_with_lse(inputs.to(torch.float64).fresh())
    rounded, _ = reference.paged_attention_with_lse(inputs.fresh())
    assert_within_budget(attend(inputs, impl)[0], exact, rounded)


def test_large_logits_do_not_overflow(impl: str, make: Callable[..., Inputs]) -> None:
    inputs = make(SMALL)
    inputs = replace(inputs, q=inputs.q * 1e4)
    out, lse, _ = attend(inputs, impl)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_lse_merges_disjoint_keys(impl: str) -> None:
    """A window over the last keys and a shorter sequence over the others make the whole."""
    length, last = 90, 37
    inputs = make_inputs(Case(num_q_heads=4, num_kv_heads=2, head_dim=32, lengths=((1, length),)))
    whole, whole_lse, kv = attend(inputs, impl)
    tail, tail_lse, _ = attend(inputs, impl, window=last)
    slot = slots_of(inputs.page_table[0], length - last, kv.shape[2])[-1:]
    head, head_lse, _ = attend(
        replace(
            inputs,
            k=kv.flatten(1, 2)[0, slot],
            v=kv.flatten(1, 2)[1, slot],
            kv=kv,
            seq_lens=inputs.seq_lens - last,
            slot_mapping=slot.int(),
        ),
        impl,
    )
    lse = torch.stack([head_lse, tail_lse, torch.full_like(tail_lse, -math.inf)])
    out = torch.stack([head, tail, torch.zeros_like(tail)])
    weights = torch.softmax(lse, 0)
    torch.testing.assert_close((weights[..., None] * out).sum(0), whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.logsumexp(0), whole_lse, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "long_decode", "long_extend"])
def test_scales_of_8_bits_are_any_numbers(impl: str, name: str) -> None:
    inputs = make_inputs(CASES[name], unused=0.0).in_fp8(1.3)
    given = inputs.fresh()
    expected, expected_lse = reference.paged_attention_with_lse(given)
    out, lse, kv = attend(inputs, impl)
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=5e-6, rtol=1e-5)
    assert torch.equal(bits(kv), bits(given.kv))


def test_what_8_bits_cannot_hold_becomes_the_largest_number(impl: str) -> None:
    inputs = make_inputs(SMALL, unused=0.0, fp8=True)
    rows = torch.tensor([1e-9, 448.0, 463.9, 465.0, 1e6, torch.inf, -torch.inf, -500.0] * 4)
    k = (rows * inputs.kv_scales[0, :, None]).expand_as(inputs.k).contiguous()
    _, _, kv = attend(replace(inputs, k=k), impl)
    slots = inputs.slot_mapping.long()
    kept = kv[0].flatten(0, 1).float()[slots]
    assert kept.equal(torch.tensor([0.0, *[448.0] * 5, *[-448.0] * 2] * 4).expand_as(kept))
    _, _, kv = attend(replace(inputs, k=torch.full_like(k, torch.nan)), impl)
    assert kv[0].flatten(0, 1).float()[slots].isnan().all()


# ---- biases by distance ----------------------------------------------------------------------


@pytest.mark.parametrize("options", ["plain", "window_softcap"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "reach"),
    [("qwen3", 30), ("odd", 1), ("odd", 30), ("long_decode", 200), ("long_extend", 100)],
)
def test_biases_match_float64(
    impl: str, name: str, reach: int, dtype: str, options: str, make: Callable[..., Inputs]
) -> None:
    _biased(impl)
    inputs = make(CASES[name], dtype=DTYPES[dtype], padding=(3, 2))
    hide_what_is_before(OPTIONS[options]["window"], inputs)
    biases = make_biases(inputs, reach=reach)
    biased = replace(inputs, relative_bias=biases, **OPTIONS[options])
    chosen = {"scale": CASES[name].head_dim ** -0.5, **OPTIONS[options]}
    chosen |= {"kv_scales": inputs.kv_scales}
    exact, rounded = (
        reference.paged_attention_with_lse(each.fresh())
        for each in (biased.to(torch.float64), biased)
    )
    out, lse, _ = attend(inputs, impl, relative_bias=biases, **OPTIONS[options])
    num_tokens = int(inputs.cu_seqlens[-1])
    assert_within_budget(out, exact[0], rounded[0])
    assert_within_budget(lse[:num_tokens], exact[1][:num_tokens], rounded[1][:num_tokens])
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    alone = paged_attention(*inputs.args(), impl=impl, relative_bias=biases, **chosen)
    assert torch.equal(out, alone)


def test_biases_are_added_by_distance(impl: str) -> None:
    """One that takes all weight leaves the value of the key at its distance."""
    _biased(impl)
    inputs = make_inputs(Case(num_q_heads=6, num_kv_heads=2, head_dim=32, lengths=((40, 150),)))
    distances = torch.arange(6) * 13
    biases = torch.zeros(40, 6, 66)
    biases.scatter_(2, distances.expand(40, 6)[..., None], 1e4)
    out, _, kv = attend(inputs, impl, relative_bias=biases)
    values = kv[1].flatten(0, 1)[slots_of(inputs.page_table[0], 150, kv.shape[2])]
    for head, distance in enumerate(distances.tolist()):
        assert torch.equal(out[:, head], values[110 - distance : 150 - distance, head // 3])


def test_biases_of_zero_change_nothing(impl: str, make: Callable[..., Inputs]) -> None:
    _biased(impl)
    inputs = make(CASES["odd" if "cpp" not in impl else "qwen3_next"])
    plain = attend(inputs, impl)
    biased = attend(inputs, impl, relative_bias=torch.zeros(*inputs.q.shape[:2], 21))
    torch.testing.assert_close(biased[0], plain[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(biased[1], plain[1], atol=1e-6, rtol=1e-6)


def test_biased_sequences_do_not_depend_on_one_another(
    impl: str, make: Callable[..., Inputs]
) -> None:
    """Each alone gives the bits that it gives within the batch, which is padded."""
    _biased(impl)
    inputs = make(CASES["qwen3"], padding=(2, 1))
    biases = make_biases(inputs, reach=9)
    out, lse, _ = attend(inputs, impl, relative_bias=biases)
    for n in range(2):
        rows, part = inputs.of([n])
        part_out, part_lse, _ = attend(part, impl, relative_bias=biases[rows])
        assert torch.equal(part_out, out[rows])
        assert torch.equal(part_lse, lse[rows])


@pytest.mark.parametrize("impl", ["cpp_invariant"])
def test_a_biased_token_has_the_bits_that_it_has_alone(impl: str) -> None:
    total = 150
    case = Case(num_q_heads=4, num_kv_heads=1, head_dim=32, lengths=((total, total),))
    whole = make_inputs(case)
    biases = make_biases(whole, reach=70)
    expected, _, _ = attend(whole, impl, relative_bias=biases)

    def attend_alone(token: Inputs) -> tuple[Tensor, Tensor]:
        bias = biases[token.seq_lens.long() - 1]
        out, _, kv = attend(token, impl, relative_bias=bias)
        return out, kv

    outs, _ = whole.in_pieces(1, attend_alone)
    assert torch.equal(torch.cat(outs), expected)


def _biased(impl: str) -> None:
    if RELATIVE_BIAS not in IMPLEMENTATIONS[impl].capability.features:
        pytest.skip(f"{impl} has no biases")


def test_pages_before_the_window_may_be_gone(impl: str, make: Callable[..., Inputs]) -> None:
    inputs = make(CASES["long_decode"])
    expected, _, _ = attend(inputs, impl, window=40)
    gone = torch.arange(inputs.page_table.shape[1]) < (inputs.seq_lens[:, None] - 40) // 16
    inputs = replace(inputs, page_table=inputs.page_table.masked_fill(gone, 0))
    assert torch.equal(attend(inputs, impl, window=40)[0], expected)


# ---- the op as the compiler sees it ----------------------------------------------------------


def test_opcheck_of_fp8_and_biases(impl: str) -> None:
    inputs = make_inputs(SMALL, unused=0.0, fp8=True)
    options = {"scale": 0.2, "window": 5, "softcap": 3.0, "impl": impl}
    options |= {"kv_scales": inputs.kv_scales, "relative_bias": make_biases(inputs, reach=7)}
    op = torch.ops.torch_hybrid.paged_attention.default
    torch.library.opcheck(op, inputs.args(), options, test_utils=FP8_OPCHECKS)


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, **changes: object) -> str:
    tensors = {name: value for name, value in changes.items() if name in TENSORS}
    options = {name: value for name, value in changes.items() if name not in tensors}
    inputs = replace(make_inputs(SMALL), **tensors)
    options = {"scale": 1.0, "kv_scales": inputs.kv_scales, "impl": impl, **options}
    return error_text(ValueError, paged_attention, *inputs.args(), **options)


def test_error_texts() -> None:
    good = make_inputs(SMALL)
    errors = [
        failing("torch", q=good.q[:, :3]),
        failing("torch", kv=good.in_fp8().kv),
        failing("torch", kv_scales=good.in_fp8().kv_scales),
        failing("torch", kv=good.in_fp8().kv, kv_scales=torch.ones(2)),
        failing(
            "torch",
            **{name: getattr(good, name)[..., 1:].clone() for name in ("q", "k", "v")},
            kv=good.in_fp8().kv[..., 1:].contiguous(),
            kv_scales=good.in_fp8().kv_scales,
        ),
        failing("torch", window=-1),
        failing("torch", softcap=-2.0),
        failing("torch", scale=0.0),
        failing("torch", relative_bias=good.q[..., :0]),
        failing("torch", relative_bias=good.q[:, :2]),
        failing("torch", relative_bias=good.q.bfloat16()),
        failing("torch", relative_bias=good.q[..., :9]),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
q heads must be a multiple of the 2 key heads, got 3
kv_scales must be given for a pool of torch.float8_e4m3fn
kv_scales must be None for a pool of torch.float32
kv_scales must have shape [2, 2], got [2]
head_dim must be even for a pool of torch.float8_e4m3fn, got 31
window must be 0 or a number of keys, got -1
softcap must be 0 or positive, got -2.0
scale must be positive, got 0.0
relative_bias must have shape [T, Hq, R] with R > 0, got [11, 4, 0]
relative_bias must have shape [11, 4, 32], got [11, 2, 32]
relative_bias must have dtype torch.float32, got torch.bfloat16
relative_bias must be contiguous, got strides [128, 32, 1]""",
    )


def test_strided_rows(impl: str, make: Callable[..., Inputs]) -> None:
    """q, k and v as slices of one projection, and q beside a gate within each head."""
    inputs = make(CASES["qwen3_next"])
    expected, _, _ = attend(inputs, impl)
    wide = torch.cat([inputs.q.flatten(1), inputs.k.flatten(1), inputs.v.flatten(1)], 1)
    q, k, v = wide.split([16 * 256, 2 * 256, 2 * 256], 1)
    packed = replace(inputs, q=q.unflatten(1, (16, 256)), k=k.unflatten(1, (2, 256)))
    packed = replace(packed, v=v.unflatten(1, (2, 256)))
    assert torch.equal(attend(packed, impl)[0], expected)
    gated = torch.cat([inputs.q, torch.full_like(inputs.q, math.nan)], 2)[..., :256]
    assert torch.equal(attend(replace(inputs, q=gated), impl)[0], expected)


def test_indices_out_of_range(impl: str) -> None:
    good = make_inputs(SMALL)
    errors = [
        failing(impl, slot_mapping=good.slot_mapping + 10_000),
        failing(impl, page_table=good.page_table + 100),
        failing(impl, seq_lens=good.seq_lens + 1000),
        failing(impl, seq_lens=torch.tensor([23, 8, 1]).int()),
        failing(impl, cu_seqlens=torch.tensor([0, 1, 10, 12]).int()),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
slot_mapping must be in [16, 144), got 10022
page_table[0] must be in [1, 9), got 105
seq_lens[0] must be in [1, 64], got 1023
seq_lens[1] must be in [9, 64], got 8
cu_seqlens must rise from 0 to at most 11, got [0, 1, 10, 12]""",
    )
