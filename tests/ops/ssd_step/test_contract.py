"""What every implementation of the Mamba2 mixer's decode step is held to."""

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
from tests.ops.pages import offsets
from tests.ops.ssd_step.cases import CASES, GATES, Case, Inputs, make_inputs
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.ssd import recurrent_ssd
from torch_hybrid.ops.ssd_step import ssd_step
from torch_hybrid.ops.ssd_step.op import IMPLEMENTATIONS
from torch_hybrid.ops.ssd_step.reference import ssd_step_reference

DEVICE = "cpu"
POOLS = ("conv_state", "state")

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
        assert out.dtype == self.inputs.xBC.dtype
        assert_within_budget(out, self.out_exact, self.out_reference)
        num_tokens = int(inputs.cu_seqlens[-1])
        assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
        slots = written_slots(inputs)
        assert torch.equal(inputs.conv_state[slots], self.reference.conv_state[slots])
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
        out_exact=ssd_step_reference(*exact.args(), **exact.options()),
        reference=own,
        out_reference=ssd_step_reference(*own.args(), **own.options()),
    )


def run(inputs: Inputs, impl: str) -> Tensor:
    return ssd_step(*inputs.args(), **inputs.options(), impl=impl)


def written_slots(inputs: Inputs) -> Tensor:
    is_written = (inputs.cu_seqlens.diff() > 0) & (inputs.state_indices > 0)
    return inputs.state_indices[is_written]


def assert_same_pools(actual: Inputs, expected: Inputs) -> None:
    for name in POOLS:
        pools = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(*pools, rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.parametrize("gate", GATES)
def test_the_reference_is_its_parts(gate: str):
    """In float64: the convolution's op and, of the recurrence and what a layer does, the
    definitions."""
    case = replace(CASES["mixed"], gate=gate, dt_min=0.1, dt_max=2.0)
    inputs = make_inputs(case)
    parts = inputs.copy()
    num_tokens, num_heads = parts.dt.shape
    _, _, v_dim, k_dim = parts.state.shape
    index = (parts.cu_seqlens, parts.initial_indices, parts.state_indices)
    weights = (parts.conv_weight, parts.conv_bias, parts.conv_state)
    mixed = causal_conv1d(parts.xBC, *weights, *index, activation="silu", impl="torch")
    x, B, C = mixed.split([num_heads * v_dim, 2 * k_dim, 2 * k_dim], 1)
    dt = F.softplus(parts.dt + parts.dt_bias).clamp(0.1, 2.0)
    o = recurrent_ssd(
        C.view(num_tokens, -1, k_dim),
        B.view(num_tokens, -1, k_dim),
        x.view(num_tokens, -1, v_dim),
        dt * -parts.A_log.exp(),
        dt,
        parts.D,
        parts.state,
        *index,
        scale=1.0,
        impl="torch",
    ).flatten(1)

    def norm(y: Tensor) -> Tensor:
        groups = y.unflatten(1, (2, -1))
        return F.rms_norm(groups, groups.shape[2:], eps=1e-5).flatten(1) * parts.norm_weight

    expected = {
        "before_norm": lambda: norm(o * F.silu(parts.z)),
        "after_norm": lambda: norm(o) * F.silu(parts.z),
        "no_norm": lambda: o * F.silu(parts.z),
        "none": lambda: o,
    }[gate]()
    out = ssd_step_reference(*inputs.args(), **inputs.options())
    torch.testing.assert_close(out, expected)
    slots = written_slots(inputs)
    assert torch.equal(inputs.conv_state[slots], parts.conv_state[slots])
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
    assert_same_pools(padded, plain)


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
    assert_same_pools(shuffled, inputs)
    if impl != "torch":  # whose products are batched
        assert torch.equal(torch.cat(outs), out)
        assert_same_pools(alone, inputs)


@every_impl
def test_a_start_from_another_slot_leaves_it_untouched(impl: str):
    """A fork, or a restored prefix: what several sequences start from is there afterwards."""
    inputs = make_inputs(CASES["mixed"])
    num_slots, starts = len(inputs.state), inputs.initial_indices.clone()
    starts[2:] = starts[0]
    in_place = inputs.copy()
    for name in POOLS:
        getattr(in_place, name)[inputs.state_indices] = getattr(inputs, name)[starts]
    in_place = replace(in_place, initial_indices=inputs.state_indices * (starts > 0))
    pools = {n: getattr(inputs, n) for n in POOLS}
    elsewhere = replace(
        inputs,
        **{n: torch.cat([pool, torch.full_like(pool, torch.nan)]) for n, pool in pools.items()},
        initial_indices=starts,
        state_indices=inputs.state_indices + num_slots,
    )
    assert torch.equal(run(elsewhere, impl), run(in_place, impl))
    halves = {n: getattr(elsewhere, n).split(num_slots) for n in POOLS}
    assert_same_pools(replace(inputs, **{n: half[0] for n, half in halves.items()}), inputs)
    slots = written_slots(in_place)
    for name in POOLS:
        assert torch.equal(halves[name][1][slots], getattr(in_place, name)[slots])


@every_impl
def test_a_state_that_is_not_stored_changes_nothing(impl: str):
    """A look ahead: the outputs, and every slot as it was."""
    inputs = make_inputs(CASES["mixed"])
    tried = replace(inputs.copy(), state_indices=torch.zeros_like(inputs.state_indices))
    assert torch.equal(run(tried, impl), run(inputs.copy(), impl))
    assert_same_pools(tried, inputs)


@every_impl
def test_no_other_slot_changes(impl: str):
    """Canaries in the null slot, the slots of empty sequences, those of nobody and the last."""
    inputs = make_inputs(CASES["mixed"])
    pools = {n: getattr(inputs, n) for n in POOLS}
    canaries = {n: torch.arange(p.numel(), dtype=p.dtype).view_as(p) for n, p in pools.items()}
    inputs = replace(inputs, **{n: canary.clone() for n, canary in canaries.items()})
    others = torch.ones(len(inputs.state), dtype=torch.bool)
    others[written_slots(inputs).long()] = False
    assert others[-1]
    run(inputs, impl)
    for name, canary in canaries.items():
        pool = getattr(inputs, name)
        assert torch.equal(pool[others], canary[others])
        assert not (pool[~others] == canary[~others]).flatten(1).all(1).any()


@every_impl
def test_rows_may_lie_apart(impl: str):
    """Slices of a projection give the same bits as contiguous tensors."""
    sliced = make_inputs(CASES["mixed"], torch.bfloat16 if impl == "cpp" else torch.float32)
    assert not sliced.xBC.is_contiguous()
    rows = {name: x.contiguous() for name, x in sliced.tokens(slice(None)).items()}
    dense = replace(sliced.copy(), **rows)
    assert torch.equal(run(sliced, impl), run(dense, impl))
    assert_same_pools(sliced, dense)


@every_impl
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_nothing_to_do(impl: str, lengths: tuple[int, ...]):
    inputs = make_inputs(Case(lengths=lengths, num_padding_tokens=2))
    before = inputs.copy()
    assert torch.equal(run(inputs, impl), torch.zeros(2, 64))
    assert_same_pools(inputs, before)


@pytest.mark.parametrize("impl", [i for i in impls_on(DEVICE, IMPLEMENTATIONS) if i != "triton"])
def test_sequences_of_several_tokens_are_refused(impl: str):
    inputs = make_inputs(Case(lengths=(1, 2)))
    before = inputs.copy()
    with pytest.raises(ValueError, match=r"must have one token or none, got lengths \[1, 2\]"):
        run(inputs, impl)
    assert_same_pools(inputs, before)


@every_impl
def test_opcheck(impl: str):
    inputs = make_inputs(CASES["mixed"])
    inputs = replace(inputs, **{n: getattr(inputs, n).nan_to_num() for n in POOLS})
    overload = torch.ops.torch_hybrid.ssd_step.default
    torch.library.opcheck(overload, inputs.args(), {**inputs.options(), "impl": impl})


def test_one_trace_serves_all_batches():
    batches = [[*make_inputs(Case(lengths=(1,) * n)).args()] for n in (7, 4, 2, 9)]
    pools = [torch.randn(23, *pool.shape[1:]) for pool in batches[0][9:11]]
    for batch in batches:
        batch[9:11] = pools
    options = make_inputs(CASES["one_token"]).options()

    def step(*args: Tensor) -> Tensor:
        return ssd_step(*args, **options, impl="torch") * 2

    assert_traces_once(step, batches)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"xBC": torch.zeros(2, 8, 16)}, "xBC must have 2 dimensions, got [2, 8, 16]"),
        ({"state": torch.zeros(5, 4, 16)}, "state must have 4 dimensions, got [5, 4, 16]"),
        ({"conv_weight": torch.zeros(128, 9)}, "conv_weight must have width 2 to 8, got 9"),
        ({"conv_weight": torch.zeros(96, 4)}, "conv_weight must have shape [128, 4], got [96, 4]"),
        (
            {"xBC": torch.zeros(2, 120)},
            "xBC must have 64 + 2 G 16 channels, where G divides the 4 heads of state, got 120",
        ),
        (
            {"xBC": torch.zeros(2, 160)},
            "xBC must have 64 + 2 G 16 channels, where G divides the 4 heads of state, got 160",
        ),
        ({"z": torch.zeros(2, 60)}, "z must have shape [2, 64], got [2, 60]"),
        (
            {"z": None},
            "norm_weight must be None where z is None: what is normed has a gate",
        ),
        ({"dt": torch.zeros(2, 4).half()}, "dt must have dtype torch.float32, got torch.float16"),
        ({"D": torch.zeros(4).half()}, "D must have dtype torch.float32, got torch.float16"),
        ({"norm_weight": torch.zeros(16)}, "norm_weight must have shape [64], got [16]"),
        (
            {"conv_state": torch.zeros(4, 3, 128)},
            "conv_state must have shape [5, 3, 128], got [4, 3, 128]",
        ),
        (
            {"conv_state": torch.zeros(5, 128, 3).mT},
            "conv_state must be contiguous, got strides [384, 1, 3]",
        ),
        (
            {"state_indices": torch.zeros(2)},
            "state_indices must have dtype torch.int32, got torch.float32",
        ),
        ({"xBC": torch.zeros(128, 2).T}, "xBC must have contiguous rows, got strides [1, 2]"),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
        ({"dt_min": 0.5, "dt_max": 0.1}, "dt_min and dt_max must rise from 0, got 0.5 and 0.1"),
        ({"norm_groups": 3}, "norm_groups must divide the 64 channels of x, got 3"),
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
        schema = str(torch.ops.torch_hybrid.ssd_step.default._schema)
        self.assertExpectedInline(
            schema.replace(", ", "\n  "),
            """\
torch_hybrid::ssd_step(Tensor xBC
  Tensor? z
  Tensor dt
  Tensor conv_weight
  Tensor? conv_bias
  Tensor A_log
  Tensor dt_bias
  Tensor D
  Tensor? norm_weight
  Tensor(a!) conv_state
  Tensor(b!) state
  Tensor cu_seqlens
  Tensor initial_indices
  Tensor state_indices
  *
  str activation
  float dt_min
  float dt_max
  bool norm_before_gate
  int norm_groups
  float norm_eps
  str impl) -> Tensor""",
        )
