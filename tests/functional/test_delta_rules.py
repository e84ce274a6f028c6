"""Delta rules to train with: values and gradients of every implementation, packed and single."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from tests.functional.rules import (
    RULES,
    Rule,
    assert_same_bits_on_threads,
    offsets,
    packing,
    weights,
    with_gradients,
)
from tests.ops.contract import assert_same_bits, assert_within_budget, skip_reason
from torch_hybrid.ops.core.registration import REGISTERED

# One token, chunk borders of 32 and their neighbours, an empty sequence, and long ones.
LENGTHS = {
    "short": (1, 2, 0, 17),
    "borders": (31, 32, 33, 64, 65),
    "long": (300,),
    "mixed": (5, 100, 1, 0, 128, 66),
}
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def on_a_cpu() -> Iterator[object]:
    """Each rule in each implementation that has a backward of its own here."""
    ops = {"gated": "gated_delta_rule_backward", "kimi": "kimi_delta_attention_backward"}
    for rule, op in ops.items():
        for name, each in REGISTERED[op].items():
            if "cpu" in each.capability.devices:
                why = skip_reason(each, "cpu")
                mark = pytest.mark.skipif(bool(why), reason=why or "")
                yield pytest.param(RULES[rule], name, id=f"{rule}, {name}", marks=mark)


on_each = pytest.mark.parametrize(("rule", "impl"), [*on_a_cpu()])


@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@on_each
def test_gradients_within_twice_the_error_of_transformers(
    rule: Rule, impl: str, lengths: tuple[int, ...], qk_l2norm: bool
) -> None:
    xs = rule.inputs(lengths)
    w = weights(xs)
    ours = with_gradients(
        lambda x: rule.function(*x[:5], packing(lengths), x[5], qk_l2norm=qk_l2norm, impl=impl),
        xs,
        w,
    )
    exact = with_gradients(
        lambda x: rule.exact(x, lengths, qk_l2norm=qk_l2norm), [x.double() for x in xs], w
    )
    theirs = with_gradients(lambda x: rule.theirs(x, lengths, qk_l2norm=qk_l2norm), xs, w)
    for name, a, b, c in zip(NAMES, ours, exact, theirs, strict=True):
        try:
            assert_within_budget(a, b, c)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("g", [0.0, -20.0, -torch.inf])
@on_each
def test_extreme_decays(rule: Rule, impl: str, g: float) -> None:
    """Of all tokens alike. transformers' own gradients are NaN where a decay is -inf."""
    lengths = (70, 3)
    xs = rule.inputs(lengths)
    xs[3].fill_(g)
    w = weights(xs)
    ours = with_gradients(lambda x: rule.function(*x[:5], packing(lengths), x[5], impl=impl), xs, w)
    exact = with_gradients(
        lambda x: rule.exact(x, lengths, qk_l2norm=False), [x.double() for x in xs], w
    )
    for a, b in zip(ours, exact, strict=True):
        b = b.nan_to_num()  # e^-inf times its derivative
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-6 * b.abs().max().item() + 1e-30)


@on_each
def test_packed_has_the_bits_of_single(rule: Rule, impl: str) -> None:
    lengths = (70, 1, 0, 64, 20, 33)
    xs = rule.inputs(lengths)
    w = weights(xs)

    def run(x, packed):
        return rule.function(*x[:5], packed, x[5], qk_l2norm=True, impl=impl)

    whole = with_gradients(lambda x: run(x, packing(lengths)), xs, w)
    starts = offsets(lengths).tolist()
    for n, (start, end) in enumerate(pairwise(starts)):
        rows, seq = slice(start, end), slice(n, n + 1)
        own = [x[rows] for x in xs[:5]] + [xs[5][seq]]
        alone = with_gradients(lambda x: run(x, None), own, [w[0][rows], w[1][seq]])
        for name, a, b in zip(NAMES, alone, whole, strict=True):
            assert_same_bits(a, b[seq if "state" in name else rows])


@on_each
def test_bits_depend_on_no_run_and_no_number_of_threads(rule: Rule, impl: str) -> None:
    lengths = (40, 90, 3)
    xs = rule.inputs(lengths)
    w = weights(xs)

    def run():
        return with_gradients(
            lambda x: rule.function(*x[:5], packing(lengths), x[5], impl=impl), xs, w
        )

    assert_same_bits_on_threads(run)


@on_each
def test_bfloat16(rule: Rule, impl: str) -> None:
    """Within one rounding of results from float32 arithmetic on the rounded inputs."""
    lengths = (40, 7)
    xs = rule.inputs(lengths, torch.bfloat16)
    w = [x.bfloat16().float() for x in weights(xs)]

    def run(x):
        return rule.function(*x[:5], packing(lengths), x[5], qk_l2norm=True, impl=impl)

    ours, wide = with_gradients(run, xs, w), with_gradients(run, [x.float() for x in xs], w)
    for a, b in zip(ours, wide, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=1e-5 * b.abs().max().item())


@on_each
def test_autocast_does_not_reach_in(rule: Rule, impl: str) -> None:
    lengths = (40,)
    xs = rule.inputs(lengths)
    w = weights(xs)

    def run():
        return with_gradients(lambda x: rule.function(*x[:5], None, x[5], impl=impl), xs, w)

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(run(), plain, strict=True):
            assert_same_bits(a, b)


@on_each
def test_rows_apart_and_results_that_nobody_asks_for(rule: Rule, impl: str) -> None:
    """Slices of a projection; a gradient that comes by the final states alone; no states."""
    lengths = (40, 5)
    xs = rule.inputs(lengths)

    def apart(x):
        return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]]

    def run(x, at):
        return rule.function(*x[:5], packing(lengths), x[5], impl=impl)[at]

    for at in (0, 1):
        leaves = [x.clone().requires_grad_() for x in xs]
        dense = torch.autograd.grad(run(leaves, at).sum(), leaves)
        sliced = torch.autograd.grad(
            run([*(apart(x) if x.ndim == 3 else x for x in leaves[:5]), leaves[5]], at).sum(),
            leaves,
        )
        for a, b in zip(sliced, dense, strict=True):
            assert_same_bits(a, b)
    zeros = [*leaves[:5], torch.zeros_like(xs[5])]
    o, final = rule.function(*leaves[:5], packing(lengths), impl=impl, output_final_state=False)
    assert final is None
    assert_same_bits(o, run(zeros, 0))


@on_each
def test_padding_and_no_tokens(rule: Rule, impl: str) -> None:
    """Rows behind the last sequence are not read and have no gradient; T may be 0."""
    xs = rule.inputs((9,))
    packed = packing((9,))
    packed.cu_seqlens[1] = 5
    for x in xs[:5]:
        x[5:] = torch.nan
    o, final, *grads = with_gradients(
        lambda x: rule.function(*x[:5], packed, x[5], qk_l2norm=True, impl=impl),
        xs,
        [torch.ones(xs[2].shape), torch.ones(xs[5].shape)],
    )
    assert all(x.isfinite().all() for x in (o, final, *grads))
    assert all(not x[5:].any() for x in (o, *grads[:5]))
    none = rule.inputs((0,))
    o, final, *grads = with_gradients(
        lambda x: rule.function(*x[:5], packing((0,)), x[5], impl=impl), none, weights(none)
    )
    assert_same_bits(final, none[5])
    assert [x.shape for x in grads] == [x.shape for x in none]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradcheck_of_the_torch_form(rule: Rule) -> None:
    lengths = (35, 0, 1)
    xs = [x.requires_grad_() for x in rule.inputs(lengths, torch.float64)]
    torch.autograd.gradcheck(
        lambda *x: rule.function(*x[:5], packing(lengths), x[5], qk_l2norm=True, impl="torch"),
        xs,
        fast_mode=True,
    )


@pytest.mark.parametrize(
    "rule_and_op",
    [("gated", "gated_delta_rule_forward"), ("kimi", "kimi_delta_attention_forward")],
    ids=RULES,
)
def test_opcheck_with_gradients(rule_and_op: tuple[str, str]) -> None:
    name, op = rule_and_op
    xs = [x.requires_grad_() for x in RULES[name].inputs((5, 34))]
    options = {"scale": 0.5, "qk_l2norm": True, "output_final_state": True, "impl": "torch"}
    cu_seqlens = offsets((5, 34)).int()
    torch.library.opcheck(
        getattr(torch.ops.torch_hybrid, op).default, (*xs[:5], cu_seqlens, xs[5]), options
    )
