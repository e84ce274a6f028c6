"""What every implementation of both execution forms of the gated delta rule is held to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import expecttest
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.ops.contract import (
    assert_traces_once,
    assert_within_budget,
    pool_clones,
    skip_reason,
)
from tests.ops.gated_delta_rule.cases import CASES, Case, Inputs, make_inputs, offsets
from torch_hybrid.ops.gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from torch_hybrid.ops.gated_delta_rule.op import (
    CHUNK_IMPLEMENTATIONS,
    RECURRENT_IMPLEMENTATIONS,
)
from torch_hybrid.ops.gated_delta_rule.reference import gated_delta_rule_reference
from torch_hybrid.ops.recurrence import CHUNK_SIZES

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
        f"recurrent-{name}": (Form(op=recurrent_gated_delta_rule, impl=name), implementation)
        for name, implementation in RECURRENT_IMPLEMENTATIONS.items()
    }
    chunk = {
        f"chunk{size}-{name}": (
            Form(op=chunk_gated_delta_rule, impl=name, chunk_size=size),
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
        out_exact=gated_delta_rule_reference(*exact.args(), **exact.options()),
        reference=reference,
        out_reference=gated_delta_rule_reference(*reference.args(), **reference.options()),
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
    inputs = make_inputs(Case(lengths=(128,), num_k_heads=1, num_v_heads=1))
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
@pytest.mark.parametrize("decay", [0.0, -1e-3, -1.0, -20.0, -torch.inf])
def test_any_constant_decay(form: Form, decay: float):
    _assert_matches(form, _expect_decay(decay))


@every_form
def test_a_small_decay_survives_large_ones_before_it(form: Form):
    """Cumulated decays lose their last digits when they grow: differences must not."""
    _assert_matches(form, _expect_small_decays_after_large_ones())


@one_form_each
def test_negative_eigenvalues_and_plain_keys(form: Form):
    inputs = make_inputs(CASES["mixed"])
    unit_k = torch.nn.functional.normalize(inputs.k, dim=-1)
    inputs = replace(inputs, k=unit_k, beta=2 * inputs.beta, qk_l2norm=False, scale=0.3)
    _assert_matches(form, _expect(inputs))


@every_form
def test_segments_continue_the_whole(form: Form):
    """Cutting a sequence anywhere and carrying its state on is within the whole's own error."""
    whole = _expect_case(Case(lengths=(150,), num_v_heads=2), torch.float32)
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
    """Slices of a projection give the same bits as contiguous tensors."""
    sliced = make_inputs(CASES["qwen3_next"], torch.bfloat16)
    assert not sliced.q.is_contiguous()
    wide = torch.randn(2, *sliced.g.shape).repeat(1, 1, 2)
    wide[0, :, : sliced.g.shape[1]], wide[1, :, : sliced.g.shape[1]] = sliced.g, sliced.beta
    sliced = replace(
        sliced, g=wide[0, :, : sliced.g.shape[1]], beta=wide[1, :, : sliced.g.shape[1]]
    )
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
        return form.op(*args, scale=0.25, qk_l2norm=True, **form.options()) * 2

    batches = [
        [*make_inputs(Case(lengths=lengths)).args()]
        for lengths in [(3, 1, 2, 4, 1, 1, 7), (1,) * 4, (5, 6), (40, 1, 1, 7, 9)]
    ]
    state = torch.randn(23, *batches[0][5].shape[1:])
    for batch in batches:
        batch[5] = state
    assert_traces_once(step, batches)


@pytest.mark.slow
@one_form_each
def test_no_clone_of_the_state_pool(form: Form):
    def step(*args: Tensor) -> Tensor:
        return form.op(*args, scale=0.25, qk_l2norm=True, **form.options()) * 2

    inputs = make_inputs(CASES["mixed"])
    assert pool_clones(step, inputs.args(), [inputs.state]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(8, 16)}, "q must have 3 dimensions, got [8, 16]"),
        ({"k": torch.zeros(8, 2, 12)}, "k must have shape [8, 2, 16], got [8, 2, 12]"),
        ({"v": torch.zeros(7, 4, 16)}, "v must have shape [8, 4, 16], got [7, 4, 16]"),
        ({"beta": torch.zeros(8, 3)}, "beta must have shape [8, 4], got [8, 3]"),
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
    for op in (recurrent_gated_delta_rule, chunk_gated_delta_rule):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            op(*inputs.args(), **inputs.options(), impl="torch")


def test_heads_must_divide():
    inputs = make_inputs(Case(lengths=(2,), num_k_heads=2, num_v_heads=3))
    with pytest.raises(ValueError, match="v must have a multiple of the 2 heads of k, got 3"):
        recurrent_gated_delta_rule(*inputs.args(), **inputs.options(), impl="torch")


def test_options_are_checked():
    inputs = make_inputs(Case(lengths=(2,)))
    with pytest.raises(ValueError, match="impl must be one of"):
        recurrent_gated_delta_rule(*inputs.args(), **inputs.options(), impl="none")
    with pytest.raises(ValueError, match=r"chunk_size must be one of \[16, 32, 64, 128\], got 20"):
        chunk_gated_delta_rule(*inputs.args(), **inputs.options(), chunk_size=20, impl="torch")


@pytest.mark.parametrize(
    "oracle", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"]
)
def test_reference_agrees_with_transformers(oracle: str):
    """Their state is [K, V], their layout [batch, T, H, K], and their scale is K ** -0.5."""
    inputs = make_inputs(Case(lengths=(70,), num_k_heads=2, num_v_heads=6, k_dim=24, v_dim=16))
    out = gated_delta_rule_reference(*inputs.args(), **inputs.options())
    slot = int(inputs.state_indices[0])
    initial = make_inputs(Case(lengths=(70,), num_k_heads=2, num_v_heads=6, k_dim=24, v_dim=16))
    theirs, final = getattr(qwen3_next, oracle)(
        *(x[None] for x in inputs.args()[:3]),
        g=inputs.g[None],
        beta=inputs.beta[None],
        initial_state=initial.state[slot].mT[None].contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.state[slot], final[0].mT, rtol=1e-5, atol=1e-5)


class TestSchemas(expecttest.TestCase):
    def test_schemas(self):
        schemas = [
            str(getattr(torch.ops.torch_hybrid, op.__name__).default._schema).replace(", ", "\n  ")
            for op in (recurrent_gated_delta_rule, chunk_gated_delta_rule)
        ]
        self.assertExpectedInline(
            "\n".join(schemas),
            """\
torch_hybrid::recurrent_gated_delta_rule(Tensor q
  Tensor k
  Tensor v
  Tensor g
  Tensor beta
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor state_indices
  Tensor has_initial_state
  *
  float scale
  bool qk_l2norm
  str impl) -> Tensor
torch_hybrid::chunk_gated_delta_rule(Tensor q
  Tensor k
  Tensor v
  Tensor g
  Tensor beta
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor state_indices
  Tensor has_initial_state
  *
  float scale
  bool qk_l2norm
  int chunk_size
  str impl) -> Tensor""",
        )
