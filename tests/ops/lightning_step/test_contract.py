"""What every implementation of the lightning mixer's decode step is held to."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.contract import (
    assert_traces_once,
    assert_within_budget,
    impls_on,
    skip_reason,
)
from tests.ops.lightning_step.cases import CASES, Case, Inputs, make_inputs
from tests.ops.pages import offsets
from torch_hybrid.layers.rotary import Rotary, rotate_halves
from torch_hybrid.ops.lightning_step import lightning_step
from torch_hybrid.ops.lightning_step.op import IMPLEMENTATIONS
from torch_hybrid.ops.lightning_step.reference import lightning_step_reference
from torch_hybrid.ops.ssd import recurrent_ssd

DEVICE = "cpu"

every_impl = pytest.mark.parametrize(
    "impl",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(reason is not None, reason=reason or "it runs here"),
        )
        for name in impls_on(DEVICE, IMPLEMENTATIONS)
        for reason in [skip_reason(IMPLEMENTATIONS[name], DEVICE)]
    ],
)
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reference makes of inputs, in float64 and in their own dtype."""

    inputs: Inputs
    exact: Inputs
    out_exact: Tensor
    reference: Inputs
    out_reference: Tensor

    def check(self, out: Tensor, inputs: Inputs) -> None:
        assert out.dtype == (torch.float32 if inputs.gate is None else inputs.qkv.dtype)
        assert_within_budget(out, self.out_exact, self.out_reference)
        num_tokens = int(inputs.cu_seqlens[-1])
        assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
        slots = written_slots(inputs)
        assert_within_budget(
            inputs.state[slots], self.exact.state[slots], self.reference.state[slots]
        )


@cache
def expect(case: Case, dtype: torch.dtype) -> Expected:
    inputs = make_inputs(case, dtype)
    exact, own = inputs.exact(), inputs.copy()
    return Expected(
        inputs=inputs,
        exact=exact,
        out_exact=lightning_step_reference(*exact.args(), **exact.options()),
        reference=own,
        out_reference=lightning_step_reference(*own.args(), **own.options()),
    )


def run(inputs: Inputs, impl: str) -> Tensor:
    return lightning_step(*inputs.args(), **inputs.options(), impl=impl)


def written_slots(inputs: Inputs) -> Tensor:
    is_written = (inputs.cu_seqlens.diff() > 0) & (inputs.state_indices > 0)
    return inputs.state_indices[is_written]


def assert_same_pool(actual: Inputs, expected: Inputs) -> None:
    torch.testing.assert_close(actual.state, expected.state, rtol=0, atol=0, equal_nan=True)


@every_impl
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_is_as_exact_as_the_reference(impl: str, case: Case, dtype: torch.dtype):
    expected = expect(case, dtype)
    inputs = expected.inputs.copy()
    expected.check(run(inputs, impl), inputs)


def test_it_is_as_exact_in_fp16():
    expected = expect(CASES["mixed"], torch.float16)
    inputs = expected.inputs.copy()
    expected.check(run(inputs, "torch"), inputs)


@pytest.mark.parametrize("name", ["mixed", "odd_dims", "minimax", "ungated"])
def test_the_reference_is_its_parts(name: str):
    """The recurrence's op, and what a layer does before and after it."""
    inputs = make_inputs(CASES[name])
    parts = inputs.copy()
    dim = parts.state.shape[-1]

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else F.rms_norm(x, x.shape[-1:], eps=1e-5) * weight

    qkv = F.silu(parts.qkv) if parts.activation == "silu" else parts.qkv
    q, k, v = qkv.unflatten(1, (3, -1, dim)).unbind(1)
    q, k = norm(q, parts.q_norm_weight), norm(k, parts.k_norm_weight)
    if parts.cos is not None:
        q, k = (rotate_halves(x, Rotary(parts.cos, parts.sin)) for x in (q, k))
    g = -parts.slopes.expand(len(q), -1)
    index = (parts.cu_seqlens, parts.initial_indices, parts.state_indices)
    options = {"scale": parts.scale, "impl": "torch"}
    o = recurrent_ssd(q, k, v, g, None, None, parts.state, *index, **options).flatten(1)
    if parts.gate is not None:
        groups = (parts.norm_groups, -1)
        o = norm(o.unflatten(1, groups), parts.norm_weight.unflatten(0, groups)).flatten(1)
        o = o * parts.gate.sigmoid()
    out = lightning_step_reference(*inputs.args(), **inputs.options())
    torch.testing.assert_close(out, o)
    slots = written_slots(inputs)
    torch.testing.assert_close(inputs.state[slots], parts.state[slots])


@every_impl
def test_padding_changes_nothing(impl: str):
    """Padding tokens and empty sequences: zeros, and no other bit."""
    plain = make_inputs(replace(CASES["mixed"], num_padding_tokens=0))
    num_tokens = int(plain.cu_seqlens[-1])
    padded = replace(
        plain.copy(),
        **plain.tokens(torch.arange(num_tokens + 6) % num_tokens),
        cu_seqlens=F.pad(plain.cu_seqlens, (0, 2), value=num_tokens),
        initial_indices=F.pad(plain.initial_indices, (0, 2)),
        state_indices=F.pad(plain.state_indices, (0, 2)),
    )
    out_plain, out_padded = run(plain, impl), run(padded, impl)
    assert torch.equal(out_padded[:num_tokens], out_plain)
    assert torch.equal(out_padded[num_tokens:], torch.zeros_like(out_padded[num_tokens:]))
    assert_same_pool(padded, plain)


@every_impl
def test_neighbours_do_not_matter(impl: str):
    """Each sequence alone, and all of them in another order: the same bits."""
    inputs = make_inputs(Case(lengths=(1,) * 5))
    order = torch.tensor([3, 0, 4, 1, 2])
    index = {n: getattr(inputs, n)[order] for n in ("initial_indices", "state_indices")}
    shuffled = replace(inputs.copy(), **inputs.tokens(order), **index)
    alone = inputs.copy()
    outs = [
        run(
            replace(
                alone,
                **inputs.tokens(slice(n, n + 1)),
                cu_seqlens=offsets((1,)),
                initial_indices=inputs.initial_indices[n : n + 1],
                state_indices=inputs.state_indices[n : n + 1],
            ),
            impl,
        )
        for n in range(5)
    ]
    out, out_shuffled = run(inputs, impl), run(shuffled, impl)
    assert torch.equal(out_shuffled, out[order])
    assert_same_pool(shuffled, inputs)
    if impl != "torch":  # whose products are batched
        assert torch.equal(torch.cat(outs), out)
        assert_same_pool(alone, inputs)


@every_impl
def test_a_start_from_another_slot_leaves_it_untouched(impl: str):
    """A fork, or a restored prefix: what several sequences start from is there afterwards."""
    inputs = make_inputs(CASES["mixed"])
    num_slots, starts = len(inputs.state), inputs.initial_indices.clone()
    starts[2:] = starts[0]
    in_place = inputs.copy()
    in_place.state[inputs.state_indices] = inputs.state[starts]
    in_place = replace(in_place, initial_indices=inputs.state_indices * (starts > 0))
    elsewhere = replace(
        inputs,
        state=torch.cat([inputs.state, torch.full_like(inputs.state, torch.nan)]),
        initial_indices=starts,
        state_indices=inputs.state_indices + num_slots,
    )
    assert torch.equal(run(elsewhere, impl), run(in_place, impl))
    first, second = elsewhere.state.split(num_slots)
    assert_same_pool(replace(inputs, state=first), inputs)
    slots = written_slots(in_place)
    assert torch.equal(second[slots], in_place.state[slots])


@every_impl
def test_a_state_that_is_not_stored_changes_nothing(impl: str):
    """A look ahead: the outputs, and every slot as it was."""
    inputs = make_inputs(CASES["mixed"])
    tried = replace(inputs.copy(), state_indices=torch.zeros_like(inputs.state_indices))
    assert torch.equal(run(tried, impl), run(inputs.copy(), impl))
    assert_same_pool(tried, inputs)


@every_impl
def test_no_other_slot_changes(impl: str):
    """Canaries in the null slot, the slots of empty sequences, those of nobody and the last."""
    inputs = make_inputs(CASES["mixed"])
    canary = torch.arange(inputs.state.numel(), dtype=torch.float32).view_as(inputs.state)
    inputs = replace(inputs, state=canary.clone())
    others = torch.ones(len(canary), dtype=torch.bool)
    others[written_slots(inputs).long()] = False
    assert others[-1]
    run(inputs, impl)
    assert torch.equal(inputs.state[others], canary[others])
    assert not (inputs.state[~others] == canary[~others]).flatten(1).all(1).any()


@every_impl
def test_rows_may_lie_apart(impl: str):
    """Slices of a projection give the same bits as contiguous tensors."""
    sliced = make_inputs(CASES["mixed"])
    assert not sliced.qkv.is_contiguous()
    rows = {name: x.contiguous() for name, x in sliced.tokens(slice(None)).items()}
    dense = replace(sliced.copy(), **rows)
    assert torch.equal(run(sliced, impl), run(dense, impl))
    assert_same_pool(sliced, dense)


@every_impl
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_nothing_to_do(impl: str, lengths: tuple[int, ...]):
    inputs = make_inputs(Case(lengths=lengths, num_padding_tokens=2))
    before = inputs.copy()
    assert torch.equal(run(inputs, impl), torch.zeros(2, 64))
    assert_same_pool(inputs, before)


@pytest.mark.parametrize("impl", [i for i in impls_on(DEVICE, IMPLEMENTATIONS) if i != "triton"])
def test_sequences_of_several_tokens_are_refused(impl: str):
    inputs = make_inputs(Case(lengths=(1, 2)))
    before = inputs.copy()
    with pytest.raises(ValueError, match=r"must have one token or none, got lengths \[1, 2\]"):
        run(inputs, impl)
    assert_same_pool(inputs, before)


@every_impl
@pytest.mark.parametrize("name", ["mixed", "ungated"])
def test_opcheck(impl: str, name: str):
    inputs = make_inputs(CASES[name])
    inputs = replace(inputs, state=inputs.state.nan_to_num())
    overload = torch.ops.torch_hybrid.lightning_step.default
    torch.library.opcheck(overload, inputs.args(), {**inputs.options(), "impl": impl})


def test_one_trace_serves_all_batches():
    batches = [[*make_inputs(Case(lengths=(1,) * n)).args()] for n in (7, 4, 2, 9)]
    pool = torch.randn(23, *batches[0][8].shape[1:])
    for batch in batches:
        batch[8] = pool
    options = make_inputs(CASES["one_token"]).options()

    def step(*args: Tensor) -> Tensor:
        return lightning_step(*args, **options, impl="torch") * 2

    assert_traces_once(step, batches)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(2, 8, 16)}, "qkv must have 2 dimensions, got [2, 8, 16]"),
        ({"state": torch.zeros(5, 4, 16)}, "state must have 4 dimensions, got [5, 4, 16]"),
        (
            {"state": torch.zeros(5, 4, 16, 8)},
            "state must have shape [5, 4, 16, 16], got [5, 4, 16, 8]",
        ),
        ({"qkv": torch.zeros(2, 128)}, "qkv must have shape [2, 192], got [2, 128]"),
        ({"gate": torch.zeros(2, 60)}, "gate must have shape [2, 64], got [2, 60]"),
        ({"gate": None}, "gate and norm_weight must both be given, or both be None"),
        (
            {"k_norm_weight": None},
            "q_norm_weight and k_norm_weight must both be given, or both be None",
        ),
        ({"sin": None}, "cos and sin must both be given, or both be None"),
        ({"sin": torch.zeros(2, 3)}, "sin must have shape [2, 4], got [2, 3]"),
        ({"cos": torch.zeros(2, 9)}, "cos must have at most 8 columns, got 9"),
        (
            {"cos": torch.zeros(2, 4).double()},
            "cos must have dtype torch.float32, got torch.float64",
        ),
        ({"slopes": torch.zeros(3)}, "slopes must have shape [4], got [3]"),
        (
            {"slopes": torch.zeros(4).half()},
            "slopes must have dtype torch.float32, got torch.float16",
        ),
        (
            {"q_norm_weight": torch.zeros(16).half()},
            "q_norm_weight must have dtype torch.float32, got torch.float16",
        ),
        ({"norm_weight": torch.zeros(16)}, "norm_weight must have shape [64], got [16]"),
        (
            {"state_indices": torch.zeros(2)},
            "state_indices must have dtype torch.int32, got torch.float32",
        ),
        ({"qkv": torch.zeros(192, 2).T}, "qkv must have contiguous rows, got strides [1, 2]"),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
        ({"norm_groups": 3}, "norm_groups must divide the 64 channels of o, got 3"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(Case(lengths=(1, 1))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(inputs, "torch")


def test_unknown_implementation():
    with pytest.raises(ValueError, match="impl must be one of"):
        run(make_inputs(CASES["one_token"]), "none")


class TestSchema(expecttest.TestCase):
    def test_schema(self):
        schema = str(torch.ops.torch_hybrid.lightning_step.default._schema)
        self.assertExpectedInline(
            schema.replace(", ", "\n  "),
            """\
torch_hybrid::lightning_step(Tensor qkv
  Tensor? gate
  Tensor? q_norm_weight
  Tensor? k_norm_weight
  Tensor? cos
  Tensor? sin
  Tensor slopes
  Tensor? norm_weight
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor initial_indices
  Tensor state_indices
  *
  str activation
  float scale
  int norm_groups
  float norm_eps
  str impl) -> Tensor""",
        )
