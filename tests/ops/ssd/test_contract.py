"""What every implementation of both execution forms of the recurrence is held to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import expecttest
import pytest
import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.minimax import MiniMaxConfig
from transformers.models.minimax import modeling_minimax as minimax

from tests.ops.contract import (
    assert_traces_once,
    assert_within_budget,
    pool_clones,
    skip_reason,
)
from tests.ops.ssd.cases import CASES, Case, Inputs, make_inputs, offsets
from torch_hybrid.ops.recurrence import CHUNK_SIZES
from torch_hybrid.ops.ssd import chunk_ssd, recurrent_ssd
from torch_hybrid.ops.ssd.op import (
    CHUNK_IMPLEMENTATIONS,
    RECURRENT_IMPLEMENTATIONS,
)
from torch_hybrid.ops.ssd.reference import ssd_reference

DEVICE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One execution form by one implementation, with its chunk size where it has one."""

    op: Callable[..., Tensor]
    impl: str
    chunk_size: int | None = None

    def options(self) -> dict[str, object]:
        chunk = {} if self.chunk_size is None else {"chunk_size": self.chunk_size}
        return {**chunk, "impl": self.impl}

    def __call__(self, inputs: Inputs) -> Tensor:
        return self.op(*inputs.args(), **inputs.options(), **self.options())


def _forms(chunk_sizes: tuple[int, ...]) -> list[object]:
    recurrent = {
        f"recurrent-{name}": (Form(op=recurrent_ssd, impl=name), implementation)
        for name, implementation in RECURRENT_IMPLEMENTATIONS.items()
    }
    chunk = {
        f"chunk{size}-{name}": (
            Form(op=chunk_ssd, impl=name, chunk_size=size),
            implementation,
        )
        for name, implementation in CHUNK_IMPLEMENTATIONS.items()
        for size in chunk_sizes
    }
    return [
        pytest.param(
            form,
            id=name,
            marks=pytest.mark.skipif(reason is not None, reason=reason or "it runs here"),
        )
        for name, (form, implementation) in {**recurrent, **chunk}.items()
        for reason in [skip_reason(implementation, DEVICE)]
    ]


every_form = pytest.mark.parametrize("form", _forms(CHUNK_SIZES))
one_form_each = pytest.mark.parametrize("form", _forms((16,)))
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reference makes of inputs, in float64 and in their own dtype."""

    inputs: Inputs
    exact: Inputs
    out_exact: Tensor
    reference: Inputs
    out_reference: Tensor

    def check(self, out: Tensor, state: Tensor) -> None:
        assert out.dtype == self.inputs.v.dtype
        assert_within_budget(out, self.out_exact, self.out_reference)
        slots = _written_slots(self.inputs)
        assert_within_budget(state[slots], self.exact.state[slots], self.reference.state[slots])


def _expect(inputs: Inputs) -> Expected:
    exact, reference = inputs.exact(), inputs.copy()
    return Expected(
        inputs=inputs,
        exact=exact,
        out_exact=ssd_reference(*exact.args(), **exact.options()),
        reference=reference,
        out_reference=ssd_reference(*reference.args(), **reference.options()),
    )


@cache
def _expect_case(case: Case, dtype: torch.dtype) -> Expected:
    return _expect(make_inputs(case, dtype))


@cache
def _expect_decay(decay: float) -> Expected:
    inputs = make_inputs(CASES["mixed"])
    return _expect(replace(inputs, g=torch.full_like(inputs.g, decay)))


@cache
def _expect_small_decays_after_large_ones() -> Expected:
    inputs = make_inputs(Case(lengths=(128,), num_groups=1, num_heads=1))
    inputs.g[:10] = -500.0
    inputs.g[10:] = -1e-4
    return _expect(inputs)


def _written_slots(inputs: Inputs) -> Tensor:
    is_written = (inputs.cu_seqlens.diff() > 0) & (inputs.state_indices > 0)
    return inputs.state_indices[is_written]


def _assert_matches(form: Form, expected: Expected) -> None:
    inputs = expected.inputs.copy()
    expected.check(form(inputs), inputs.state)


@every_form
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_is_as_exact_as_the_reference(form: Form, case: Case, dtype: torch.dtype):
    _assert_matches(form, _expect_case(case, dtype))


@every_form
@pytest.mark.parametrize("decay", [0.0, -1e-3, -1.0, -20.0, -50.0, -torch.inf])
def test_any_constant_decay(form: Form, decay: float):
    _assert_matches(form, _expect_decay(decay))


@every_form
def test_a_small_decay_survives_large_ones_before_it(form: Form):
    """Cumulated decays lose their last digits when they grow: differences must not."""
    _assert_matches(form, _expect_small_decays_after_large_ones())


@cache
def _expect_slow_decay_over_a_thousand_tokens() -> Expected:
    inputs = make_inputs(Case(lengths=(1000,), num_groups=1, num_heads=2))
    return _expect(replace(inputs, g=torch.full_like(inputs.g, -1e-4)))


@every_form
def test_a_slow_decay_stays_exact_over_many_chunks(form: Form):
    _assert_matches(form, _expect_slow_decay_over_a_thousand_tokens())


@one_form_each
@pytest.mark.parametrize("absent", [("dt",), ("D",), ("dt", "D")], ids="+".join)
def test_optional_arguments(form: Form, absent: tuple[str, ...]):
    inputs = replace(make_inputs(CASES["mixed"]), **dict.fromkeys(absent))
    _assert_matches(form, _expect(inputs))


@every_form
def test_segments_continue_the_whole(form: Form):
    """Cutting a sequence anywhere and carrying its state on is within the whole's own error."""
    whole = _expect_case(Case(lengths=(150,), num_heads=2), torch.float32)
    segmented = whole.inputs.copy()
    outs = []
    for start, end in [(0, 1), (1, 50), (50, 53), (53, 150)]:
        piece = replace(
            segmented,
            **segmented.tokens(slice(start, end)),
            cu_seqlens=offsets([end - start]),
        )
        outs.append(form(piece))
    whole.check(torch.cat(outs), segmented.state)


@one_form_each
def test_padding_changes_nothing(form: Form):
    """Padding tokens, empty sequences and sequences in the null slot: zeros, and no other bit."""
    plain = make_inputs(CASES["mixed"])
    num_tokens = int(plain.cu_seqlens[-1])
    plain = replace(plain, **plain.tokens(torch.arange(num_tokens)))
    filler = torch.arange(num_tokens + 6) % num_tokens
    padded = replace(
        plain.copy(),
        **plain.tokens(filler),
        cu_seqlens=torch.cat([plain.cu_seqlens, plain.cu_seqlens[-1] + torch.tensor([0, 2])]).int(),
        state_indices=torch.cat([plain.state_indices, torch.zeros(2, dtype=torch.int32)]),
        has_initial_state=torch.cat([plain.has_initial_state, torch.tensor([True, False])]),
    )
    out_plain, out_padded = form(plain), form(padded)
    assert torch.equal(out_padded[:num_tokens], out_plain)
    assert torch.equal(out_padded[num_tokens:], torch.zeros_like(out_padded[num_tokens:]))
    torch.testing.assert_close(padded.state, plain.state, rtol=0, atol=0, equal_nan=True)


@one_form_each
def test_order_of_sequences_does_not_matter(form: Form):
    inputs = make_inputs(replace(CASES["mixed"], num_padding_tokens=0))
    order = torch.tensor([3, 6, 0, 5, 1, 4, 2])
    spans = [torch.arange(a, b) for a, b in inputs.cu_seqlens.unfold(0, 2, 1).tolist()]
    tokens = torch.cat([spans[n] for n in order])
    shuffled = replace(
        inputs.copy(),
        **inputs.tokens(tokens),
        cu_seqlens=offsets([len(spans[n]) for n in order]),
        state_indices=inputs.state_indices[order],
        has_initial_state=inputs.has_initial_state[order],
    )
    out, out_shuffled = form(inputs), form(shuffled)
    assert torch.equal(out_shuffled, out[tokens])
    torch.testing.assert_close(shuffled.state, inputs.state, rtol=0, atol=0, equal_nan=True)


@one_form_each
def test_no_other_slot_changes(form: Form):
    """Canaries in the null slot, the slots of empty sequences, those of nobody and the last."""
    inputs = make_inputs(replace(CASES["mixed"], lengths=(5, 0, 1, 40)))
    canary = torch.arange(inputs.state.numel(), dtype=torch.float32).view_as(inputs.state)
    inputs = replace(inputs, state=canary.clone())
    others = torch.ones(len(canary), dtype=torch.bool)
    others[_written_slots(inputs).long()] = False
    assert others[-1]
    form(inputs)
    assert torch.equal(inputs.state[others], canary[others])
    assert not (inputs.state[~others] == canary[~others]).flatten(1).all(1).any()


@one_form_each
def test_rows_may_lie_apart(form: Form):
    """Slices of a projection, and one row for all tokens, give the bits of contiguous tensors."""
    sliced = make_inputs(CASES["bamba"], torch.bfloat16)
    assert not sliced.q.is_contiguous()
    num_tokens, num_heads = sliced.g.shape
    g = sliced.g[3].expand(num_tokens, num_heads)
    dt = torch.cat([sliced.dt, sliced.dt], 1)[:, :num_heads]
    sliced = replace(sliced, g=g, dt=dt)
    dense = replace(
        sliced.copy(), **{name: x.contiguous() for name, x in sliced.tokens(slice(None)).items()}
    )
    assert torch.equal(form(sliced), form(dense))
    torch.testing.assert_close(sliced.state, dense.state, rtol=0, atol=0, equal_nan=True)


@one_form_each
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_nothing_to_do(form: Form, lengths: tuple[int, ...]):
    inputs = make_inputs(Case(lengths=lengths, num_padding_tokens=2))
    before = inputs.state.clone()
    assert torch.equal(form(inputs), torch.zeros_like(inputs.v))
    torch.testing.assert_close(inputs.state, before, rtol=0, atol=0, equal_nan=True)


@one_form_each
def test_opcheck(form: Form):
    inputs = make_inputs(CASES["mixed"])
    inputs = replace(inputs, state=inputs.state.nan_to_num())
    overload = getattr(torch.ops.torch_hybrid, form.op.__name__).default
    options = {**inputs.options(), **form.options()}
    torch.library.opcheck(overload, inputs.args(), options)


@one_form_each
def test_one_trace_serves_all_batches(form: Form):
    def step(*args: Tensor) -> Tensor:
        return form.op(*args, scale=0.25, **form.options()) * 2

    batches = [
        [*make_inputs(Case(lengths=lengths)).args()]
        for lengths in [(3, 1, 2, 4, 1, 1, 7), (1,) * 4, (5, 6), (40, 1, 1, 7, 9)]
    ]
    state = torch.randn(23, *batches[0][6].shape[1:])
    for batch in batches:
        batch[6] = state
    assert_traces_once(step, batches)


@pytest.mark.slow
@one_form_each
def test_no_clone_of_the_state_pool(form: Form):
    def step(*args: Tensor) -> Tensor:
        return form.op(*args, scale=0.25, **form.options()) * 2

    inputs = make_inputs(CASES["mixed"])
    assert pool_clones(step, inputs.args(), [inputs.state]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(8, 16)}, "q must have 3 dimensions, got [8, 16]"),
        ({"k": torch.zeros(8, 2, 12)}, "k must have shape [8, 2, 16], got [8, 2, 12]"),
        ({"v": torch.zeros(7, 4, 16)}, "v must have shape [8, 4, 16], got [7, 4, 16]"),
        ({"dt": torch.zeros(8, 3)}, "dt must have shape [8, 4], got [8, 3]"),
        ({"D": torch.zeros(3)}, "D must have shape [4], got [3]"),
        ({"D": torch.zeros(4).half()}, "D must have dtype torch.float32, got torch.float16"),
        ({"D": torch.zeros(8)[::2]}, "D must be contiguous, got strides [2]"),
        (
            {"state": torch.zeros(5, 4, 16, 8)},
            "state must have shape [5, 4, 16, 16], got [5, 4, 16, 8]",
        ),
        ({"v": torch.zeros(8, 3, 16)}, "g must have shape [8, 3], got [8, 4]"),
        ({"v": torch.zeros(8, 4, 16).half()}, "v must have dtype torch.float32, got torch.float16"),
        (
            {"cu_seqlens": torch.zeros(3, dtype=torch.int64)},
            "cu_seqlens must have dtype torch.int32, got torch.int64",
        ),
        (
            {"q": torch.zeros(8, 16, 2).mT},
            "q must have contiguous rows, got strides [32, 1, 2]",
        ),
        (
            {"state": torch.zeros(5, 4, 16, 16).mT},
            "state must be contiguous, got strides [1024, 256, 1, 16]",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Tensor], message: str):
    inputs = replace(make_inputs(Case(lengths=(5, 3))), **changes)
    for op in (recurrent_ssd, chunk_ssd):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            op(*inputs.args(), **inputs.options(), impl="torch")


def test_heads_must_divide():
    inputs = make_inputs(Case(lengths=(2,), num_groups=2, num_heads=3))
    with pytest.raises(ValueError, match="v must have a multiple of the 2 heads of k, got 3"):
        recurrent_ssd(*inputs.args(), **inputs.options(), impl="torch")


def test_options_are_checked():
    inputs = make_inputs(Case(lengths=(2,)))
    with pytest.raises(ValueError, match="impl must be one of"):
        recurrent_ssd(*inputs.args(), **inputs.options(), impl="none")
    with pytest.raises(ValueError, match=r"chunk_size must be one of \[16, 32, 64, 128\], got 20"):
        chunk_ssd(*inputs.args(), **inputs.options(), chunk_size=20, impl="torch")


def test_reference_agrees_with_the_scan_of_bamba():
    """Theirs has a batch dimension; states, groups and D are as here, and q has no scale."""
    inputs, initial = _one_sequence(lightning=False), _one_sequence(lightning=False)
    slot, A = int(inputs.state_indices[0]), inputs.g[:1] / inputs.dt[:1]
    inputs = replace(inputs, g=inputs.dt * A)
    out = ssd_reference(*inputs.args(), scale=1.0)
    theirs, final = bamba.mamba2_chunk_scan(
        inputs.v[None],
        inputs.dt[None],
        A[0],
        inputs.k[None],
        inputs.q[None],
        chunk_size=32,
        D=inputs.D,
        initial_states=initial.state[slot][None],
        return_final_states=True,
    )
    torch.testing.assert_close(out, theirs[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(inputs.state[slot], final[0], rtol=1e-5, atol=1e-5)


def test_reference_agrees_with_the_step_of_bamba():
    inputs, initial = _one_sequence(lightning=False), _one_sequence(lightning=False)
    slot, A = int(inputs.state_indices[0]), inputs.g[:1] / inputs.dt[:1]
    inputs = replace(inputs, g=inputs.dt * A)
    out = ssd_reference(*inputs.args(), scale=1.0)
    state = initial.state[slot][None].clone()
    for t in range(len(out)):
        theirs = bamba.mamba2_selective_state_update(
            state,
            inputs.v[t : t + 1],
            inputs.dt[t : t + 1, :, None].expand_as(inputs.v[:1]),
            A[0, :, None, None].expand_as(state[0]),
            inputs.k[t : t + 1],
            inputs.q[t : t + 1],
            D=inputs.D[:, None].expand_as(inputs.v[0]),
        )
        torch.testing.assert_close(out[t], theirs[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(inputs.state[slot], state[0], rtol=1e-5, atol=1e-5)


def test_reference_agrees_with_the_lightning_attention_of_minimax():
    """A whole mixer of theirs: the projections are ours to repeat, the state comes back [K, V]."""
    config = MiniMaxConfig(
        hidden_size=24,
        num_attention_heads=3,
        head_dim=16,
        num_hidden_layers=4,
        block_size=32,
        layer_types=["linear_attention"] * 4,
    )
    theirs = minimax.MiniMaxLightningAttention(config, layer_idx=1).eval()
    x = torch.randn(1, 70, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, final = theirs(x, None, None)
        qkv = theirs.act_fn(theirs.qkv_proj(x[0])).unflatten(1, (3, 48))
        q, k, v = (part.contiguous() for part in qkv.split(16, dim=2))
        state = torch.zeros(2, 3, 16, 16)
        out = ssd_reference(
            *(q, k, v, -theirs.slope_rate.flatten().expand(70, 3), None, None, state),
            *(offsets([70]), torch.tensor([1]), torch.tensor([False])),
            scale=1.0,
        )
        gate = theirs.output_gate(x[0]).sigmoid()
        out = theirs.out_proj(gate * theirs.norm(out.flatten(1)))
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1], final[0].mT, rtol=1e-5, atol=1e-5)


def _one_sequence(*, lightning: bool) -> Inputs:
    return make_inputs(Case(lengths=(70,), num_heads=6, k_dim=24, lightning=lightning))


class TestSchemas(expecttest.TestCase):
    def test_schemas(self):
        schemas = [
            str(getattr(torch.ops.torch_hybrid, op.__name__).default._schema).replace(", ", "\n  ")
            for op in (recurrent_ssd, chunk_ssd)
        ]
        self.assertExpectedInline(
            "\n".join(schemas),
            """\
torch_hybrid::recurrent_ssd(Tensor q
  Tensor k
  Tensor v
  Tensor g
  Tensor? dt
  Tensor? D
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor state_indices
  Tensor has_initial_state
  *
  float scale
  str impl) -> Tensor
torch_hybrid::chunk_ssd(Tensor q
  Tensor k
  Tensor v
  Tensor g
  Tensor? dt
  Tensor? D
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor state_indices
  Tensor has_initial_state
  *
  float scale
  int chunk_size
  str impl) -> Tensor""",
        )
