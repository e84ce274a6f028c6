"""What every implementation of both execution forms of a recurrence is held to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Protocol, Self

import pytest
import torch
from torch import Tensor

from tests.ops.contract import (
    assert_same_bits,
    assert_within_budget,
    skip_reason,
    written_slots,
)
from tests.ops.pages import offsets
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, Implementation
from torch_hybrid.ops.core.declare import Op
from torch_hybrid.ops.core.recurrence import CHUNK, CHUNK_SIZES

DEVICE = "cpu"


class Case(Protocol):
    """Lengths of the sequences, and the shape of one layer; a frozen dataclass."""

    lengths: tuple[int, ...]
    num_padding_tokens: int


class AnyInputs(Protocol):
    """The tensors of a call, in the op's order, and its options; a frozen dataclass."""

    cu_seqlens: Tensor
    initial_indices: Tensor
    state_indices: Tensor

    def args(self) -> tuple[Tensor | None, ...]: ...

    def options(self) -> dict[str, float | bool]: ...

    def copy(self) -> Self:
        """The same inputs with a state of their own."""

    def exact(self) -> Self:
        """The same values in float64."""

    def tokens(self, index: Tensor | slice) -> dict[str, Tensor]:
        """The per-token tensors at ``index``, by name; outputs have the dtype of the first."""


class Inputs(AnyInputs, Protocol):
    """Those of a recurrence in two forms."""

    q: Tensor
    v: Tensor
    g: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One implementation, with its chunk size where it has one."""

    op: Callable[..., Tensor]
    impl: str
    chunk_size: int | None = None

    def __call__(self, inputs: Inputs) -> Tensor:
        chunk = {} if self.chunk_size is None else {"chunk_size": self.chunk_size}
        return self.op(*inputs.args(), **inputs.options(), **chunk, impl=self.impl)


def run_reference(reference: Callable[..., Tensor], inputs: AnyInputs) -> Tensor:
    """Compute by an oracle, which takes a declared op as one value."""
    if isinstance(inputs, Op):
        return reference(inputs)
    return reference(*inputs.args(), **inputs.options())


def pool_of(inputs: Any) -> Tensor:
    """Find the pool of states."""
    return getattr(inputs, getattr(inputs, "pool_name", "state"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reference makes of inputs, in float64 and in their own dtype."""

    inputs: AnyInputs
    exact: AnyInputs
    out_exact: Tensor
    reference: AnyInputs
    out_reference: Tensor

    @classmethod
    def of(cls, reference: Callable[..., Tensor], inputs: AnyInputs) -> Expected:
        exact, own, inputs = inputs.exact(), inputs.copy(), inputs.copy()
        return cls(
            inputs=inputs,
            exact=exact,
            out_exact=run_reference(reference, exact),
            reference=own,
            out_reference=run_reference(reference, own),
        )

    def check(self, out: Tensor, state: Tensor) -> None:
        """Outputs and written slots are as exact as the reference's; padding is zero, and all other
        slots are as they were."""
        assert out.dtype == next(iter(self.inputs.tokens(slice(0)).values())).dtype
        assert_within_budget(out, self.out_exact, self.out_reference)
        slots = written_slots(self.inputs)
        exact, own = pool_of(self.exact)[slots], pool_of(self.reference)[slots]
        assert_within_budget(state[slots], exact, own)
        num_tokens = int(self.inputs.cu_seqlens[-1])
        assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
        others = torch.ones(len(state), dtype=torch.bool)
        others[slots.long()] = False
        assert_same_bits(state[others], pool_of(self.inputs)[others])

    def check_form(self, form: Form) -> None:
        inputs = self.inputs.copy()
        self.check(form(inputs), pool_of(inputs))


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A recurrence: its op, its oracle and its inputs. ``cases`` has one named "mixed"."""

    op: Callable[..., Tensor]
    implementations: Mapping[str, Implementation]
    reference: Callable[..., Tensor]
    cases: Mapping[str, Case]
    make_inputs: Callable[..., Inputs]

    @property
    def chunk_size(self) -> int:
        """The one that layers run: what the chunk form takes where it is not told."""
        default: int = inspect.signature(self.op).parameters["chunk_size"].default
        return default

    def forms(
        self,
        chunk_sizes: tuple[int, ...],
        *,
        recurrent: bool = True,
    ) -> list[object]:
        """Implementations of both forms, as pytest parameters."""
        return [
            pytest.param(
                Form(op=self.op, impl=impl, chunk_size=size),
                id=f"{form}{size or ''}-{name}",
                marks=pytest.mark.skipif(reason is not None, reason=reason or "it runs here"),
            )
            for impl, implementation in self.implementations.items()
            if DEVICE in implementation.capability.devices
            for reason in [skip_reason(implementation, DEVICE)]
            for form, _, name in [impl.partition("_")]
            for size in (chunk_sizes if form == CHUNK else (None,) * recurrent)
        ]

    def mixed(self, **changes: object) -> Inputs:
        return self.make_inputs(replace(self.cases["mixed"], **changes))

    @cache  # noqa: B019
    def expect_case(self, case: Case, dtype: torch.dtype) -> Expected:
        return Expected.of(self.reference, self.make_inputs(case, dtype))

    @cache  # noqa: B019
    def expect_decay(self, decay: float) -> Expected:
        inputs = self.mixed()
        return Expected.of(self.reference, replace(inputs, g=torch.full_like(inputs.g, decay)))

    @cache  # noqa: B019
    def expect_small_decays_after_large_ones(self) -> Expected:
        inputs = self.mixed(lengths=(128,))
        inputs.g[:10] = -500.0
        inputs.g[10:] = -1e-4
        return Expected.of(self.reference, inputs)


class RecurrentContract:
    """The tests; a family's own class names the family and adds what is peculiar to it.

    ``form`` is each implementation at the chunk size that layers run, ``other_size`` each at the
    other sizes.
    """

    family: ClassVar[Family]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        family, size = self.family, self.family.chunk_size
        forms = {
            "form": family.forms((size,)),
            "other_size": family.forms(tuple(n for n in CHUNK_SIZES if n != size), recurrent=False),
        }
        for name, parameters in forms.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, parameters)
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.family.cases.values(), ids=self.family.cases)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_it_is_as_exact_as_the_reference(self, form: Form, case: Case, dtype: torch.dtype):
        self.family.expect_case(case, dtype).check_form(form)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_other_chunk_sizes_are_as_exact(self, other_size: Form, dtype: torch.dtype):
        self.family.expect_case(self.family.cases["mixed"], dtype).check_form(other_size)

    @pytest.mark.parametrize("decay", [0.0, -1e-3, -1.0, -5.0, -20.0, -50.0, -torch.inf])
    def test_any_constant_decay(self, form: Form, decay: float):
        self.family.expect_decay(decay).check_form(form)

    def test_a_small_decay_survives_large_ones_before_it(self, form: Form):
        """Cumulated decays lose their last digits when they grow: differences must not."""
        self.family.expect_small_decays_after_large_ones().check_form(form)

    def test_segments_continue_the_whole(self, form: Form):
        """Cutting a sequence anywhere and carrying its state on is within the whole's own error."""
        case = replace(self.family.cases["mixed"], lengths=(150,), num_padding_tokens=0)
        whole = self.family.expect_case(case, torch.float32)
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
        if BATCH_INVARIANT in self.family.implementations[form.impl].capability.features:
            uncut = whole.inputs.copy()
            assert torch.equal(torch.cat(outs), form(uncut))
            slots = written_slots(uncut)
            assert torch.equal(segmented.state[slots], uncut.state[slots])

    def test_one_row_of_decays_may_serve_all_tokens(self, form: Form):
        inputs = self.family.mixed()
        shared = replace(inputs.copy(), g=inputs.g[:1].expand(inputs.g.shape))
        dense = replace(inputs.copy(), g=shared.g.contiguous())
        assert torch.equal(form(shared), form(dense))
        assert_same_bits(shared.state, dense.state)

    def test_other_dtypes_are_refused(self, form: Form):
        inputs = self.family.make_inputs(self.family.cases["mixed"], torch.float64)
        with pytest.raises(ValueError, match=f"impl '{form.impl}' takes .* of torch.float64"):
            form(inputs)
