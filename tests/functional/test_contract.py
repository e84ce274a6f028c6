"""Recurrences to train with: values and gradients of every implementation, packed and single."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch

from tests.functional.recurrence import Recurrence, Results, Tensors, offsets, packing
from tests.functional.recurrences import FORMS, FROM_NOTHING, RECURRENCES
from tests.ops.contract import assert_same_bits, assert_within_budget, skip_reason
from torch_hybrid.ops.core.registration import REGISTERED


def on_each(
    recurrences: Mapping[str, Recurrence], *others: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test of each recurrence in each implementation that has a backward on a CPU."""
    return pytest.mark.parametrize(("of", "impl", *others), [*on_a_cpu(recurrences, others)])


def on_a_cpu(recurrences: Mapping[str, Recurrence], others: Sequence[str]) -> Iterator[object]:
    for name, of in recurrences.items():
        for impl, each in REGISTERED[f"{of.op}_backward"].items():
            if "cpu" in each.capability.devices:
                why = skip_reason(each, "cpu")
                mark = pytest.mark.skipif(bool(why), reason=why or "")
                cases = {"lengths": of.lengths, "decay": {str(x): x for x in of.decays}}
                for case, value in cases[others[0]].items() if others else [("", None)]:
                    values = (of, impl, value) if others else (of, impl)
                    yield pytest.param(*values, id=f"{name}-{impl}-{case}", marks=mark)


def with_gradients(run: Callable[[Tensors], Results], xs: Tensors, weights: Tensors) -> Tensors:
    """Return the results of ``run``, and the gradients of their weighted sum by its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    results = run(leaves)
    total = sum((y * w.to(y.dtype)).sum() for y, w in zip(results, weights, strict=True))
    return [*(y.detach() for y in results), *torch.autograd.grad(total, leaves)]


def run(of: Recurrence, lengths: Sequence[int], impl: str) -> Callable[[Tensors], Results]:
    return lambda xs: of.run(xs, lengths, impl)


@cache
def draws(of: Recurrence, lengths: tuple[int, ...]) -> list[tuple[Tensors, Tensors]]:
    """Draw inputs and weights of what is computed from them, once for all implementations."""
    torch.manual_seed(0)
    drawn = (of.inputs(lengths) for _ in range(of.num_draws))
    return [(xs, of.weights(xs)) for xs in drawn]


@cache
def expected(of: Recurrence, lengths: tuple[int, ...]) -> tuple[list[Tensors], list[Tensors]]:
    """Compute by the definition in float64, and by somebody else in float32."""
    wide = [
        with_gradients(lambda x: of.exact(x, lengths), [x.double() for x in xs], w)
        for xs, w in draws(of, lengths)
    ]
    return wide, [
        with_gradients(lambda x: of.theirs(x, lengths), xs, w) for xs, w in draws(of, lengths)
    ]


@on_each(FORMS, "lengths")
def test_gradients_within_twice_the_error_of_others(
    of: Recurrence, impl: str, lengths: tuple[int, ...]
) -> None:
    """Of transformers, or of the definition in float32; as exact as the definition in float64."""
    made = [with_gradients(run(of, lengths, impl), xs, w) for xs, w in draws(of, lengths)]
    names = ["out", "final_state", *(f"d{name}" for name in of.names)]
    joined = (
        [torch.cat(each) for each in zip(*parts, strict=True)]
        for parts in (made, *expected(of, lengths))
    )
    for name, a, b, c in zip(names, *joined, strict=True):
        try:
            assert_within_budget(a, b, c)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@on_each(RECURRENCES, "decay")
def test_extreme_decays(of: Recurrence, impl: str, decay: float) -> None:
    """Of all tokens alike. transformers' own gradients are NaN where a decay is -inf."""
    lengths = (70, 3)
    xs = of.inputs(lengths)
    xs[of.names.index(of.decay)].fill_(decay)
    w = of.weights(xs)
    made = with_gradients(run(of, lengths, impl), xs, w)
    wide = with_gradients(lambda x: of.exact(x, lengths), [x.double() for x in xs], w)
    for a, b in zip(made, wide, strict=True):
        b = b.nan_to_num()  # e^-inf times its derivative
        atol = of.decay_slack * b.abs().max().item() + 1e-30
        torch.testing.assert_close(a.double(), b, rtol=0, atol=atol)


@on_each(RECURRENCES | FROM_NOTHING)
def test_packed_has_the_bits_of_single(of: Recurrence, impl: str) -> None:
    """Gradients of what all sequences share are sums of theirs within rounding."""
    lengths = (70, 1, 0, 64, 20, 133)
    xs, by_token, states = of.inputs(lengths), of.by_token, len(of.names) - 1
    w = of.weights(xs)
    out, final, *grads = with_gradients(run(of, lengths, impl), xs, w)
    shared = {at: torch.zeros_like(xs[at]) for at in range(states) if at not in by_token}
    sizes = {at: total.clone() for at, total in shared.items()}
    for n, (start, end) in enumerate(pairwise(offsets(lengths).tolist())):
        parts = {**dict.fromkeys(by_token, slice(start, end)), states: slice(n, n + 1)}
        own = [x[parts.get(at, ...)] for at, x in enumerate(xs)]
        one = None if start < end else (0,)
        alone = with_gradients(run(of, one, impl), own, [w[0][start:end], w[1][n : n + 1]])
        assert_same_bits(alone[0], out[start:end])
        assert_same_bits(alone[1], final[n : n + 1])
        for at, grad in enumerate(alone[2:]):
            if at in parts:
                assert_same_bits(grad, grads[at][parts[at]])
            else:
                shared[at] += grad
                sizes[at] += grad.abs()
    for at, total in shared.items():
        atol = 1e-5 * min(1.0, grads[at].abs().max().item())
        allowed = atol + 1e-5 * sizes[at]  # terms cancel
        assert ((total - grads[at]).abs() <= allowed).all()


@on_each(RECURRENCES)
def test_bits_depend_on_no_run_and_no_number_of_threads(of: Recurrence, impl: str) -> None:
    lengths = (40, 90, 3)
    xs = of.inputs(lengths)
    w = of.weights(xs)
    before, first = torch.get_num_threads(), with_gradients(run(of, lengths, impl), xs, w)
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for a, b in zip(with_gradients(run(of, lengths, impl), xs, w), first, strict=True):
                assert_same_bits(a, b)
    finally:
        torch.set_num_threads(before)


@on_each(RECURRENCES)
def test_bfloat16(of: Recurrence, impl: str) -> None:
    """Within a rounding or a few of float32 arithmetic on the rounded inputs."""
    lengths, (rtol, atol) = (40, 7), of.rounding
    xs = of.inputs(lengths, torch.bfloat16)
    w = [x.bfloat16().float() for x in of.weights(xs)]
    rounded, wide = (
        with_gradients(run(of, lengths, impl), each, w) for each in (xs, [x.float() for x in xs])
    )
    for a, b in zip(rounded, wide, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=rtol, atol=atol * b.abs().max().item())


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "without options"])
@on_each(RECURRENCES)
def test_rows_apart_and_padding(of: Recurrence, impl: str, is_whole: bool) -> None:
    """Slices of a projection, NaN beside them and behind the last sequence, under autocast; whole
    or without states and what else may be left out; gradients of outputs or states alone."""
    xs, packed, num_tokens = of.inputs((9,)), packing((9,)), 5
    packed.cu_seqlens[1] = num_tokens
    for at in of.by_token:
        beside = torch.full_like(xs[at], torch.nan)
        xs[at] = torch.cat([xs[at], beside], of.apart).tensor_split(2, of.apart)[0]
        if of.names[at] not in of.reads_padding:
            xs[at][num_tokens:] = torch.nan
    own = [x[:num_tokens].contiguous() if at in of.by_token else x for at, x in enumerate(xs)]
    num_given = len(xs) - 1 if is_whole else len(xs) - 1 - of.num_optional
    count = len(xs) if is_whole else num_given

    def gradients(xs: Tensors, packed: object, at: int) -> Tensors:
        leaves = [x.detach().requires_grad_() for x in xs[:count]]
        named = {"initial_state": leaves[-1]} if is_whole else {}
        result = of.function(*leaves[:num_given], packing=packed, **named, impl=impl, **of.options)[
            at
        ]
        assert result is not None
        grads = torch.autograd.grad(result.sum(), leaves, materialize_grads=True)
        return [result.detach(), *grads]

    for at in (0, 1):
        with torch.autocast("cpu", torch.bfloat16):
            result, *made = gradients(xs, packed, at)
        alone, *grads = gradients(own, None, at)
        assert_same_bits(result if at else result[:num_tokens], alone)
        for n, (a, b) in enumerate(zip(made, grads, strict=True)):
            by_token = n in of.by_token
            assert_same_bits(a[:num_tokens] if by_token else a, b)
            assert not by_token or not a[num_tokens:].any()


@on_each(RECURRENCES)
def test_results_that_nobody_asks_for_and_no_tokens(of: Recurrence, impl: str) -> None:
    *xs, states = of.inputs((9,))
    out, final = of.function(*xs, impl=impl, output_final_state=False, **of.options)
    assert final is None
    zeros = torch.zeros_like(states) if of.starts_from_zeros else None
    assert_same_bits(out, of.function(*xs, None, zeros, impl=impl, **of.options)[0])
    none = of.inputs((0,))
    _, final, *grads = with_gradients(run(of, (0,), impl), none, of.weights(none))
    assert_same_bits(final, none[-1])
    assert [x.shape for x in grads] == [x.shape for x in none]


@pytest.mark.parametrize("of", FORMS.values(), ids=FORMS)
def test_gradcheck_of_the_torch_form(of: Recurrence) -> None:
    lengths = (35, 0, 1)
    xs = [x.requires_grad_() for x in of.inputs(lengths, torch.float64)]
    torch.autograd.gradcheck(lambda *x: of.run([*x], lengths, "torch"), xs, fast_mode=True)


@pytest.mark.parametrize(
    "of",
    [pytest.param(of, id=of.op) for of in RECURRENCES.values() if of.op == of.function.__name__],
)
def test_opcheck_with_gradients(of: Recurrence) -> None:
    lengths = (5, 34)
    args, options = of.op_arguments(of.inputs(lengths), offsets(lengths).int())
    op = getattr(torch.ops.torch_hybrid, f"{of.function.__name__}_forward").default
    options |= {"output_final_state": True, "impl": "torch"}
    given = tuple(x.requires_grad_() if x.is_floating_point() else x for x in args)
    torch.library.opcheck(op, given, options)
