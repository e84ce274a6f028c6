"""What every implementation of a mixer's decode step is held to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.ops.contract import (
    assert_within_budget,
    impls_on,
    skip_reason,
    written_slots,
)
from tests.ops.pages import offsets
from tests.ops.step_family import Family, Inputs
from torch_hybrid.ops.composed import COMPOSED
from torch_hybrid.ops.step_implementations import EXTEND

DEVICE = "cpu"
LENGTHS = (1, 37, 0, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reference makes of inputs, in float64 and in their own dtype."""

    inputs: Any
    exact: Any
    out_exact: Tensor
    reference: Any
    out_reference: Tensor

    def check(self, out: Tensor, inputs: Any) -> None:
        assert out.dtype == self.inputs.out_dtype
        assert_within_budget(out, self.out_exact, self.out_reference)
        num_tokens = int(inputs.cu_seqlens[-1])
        assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
        slots = written_slots(inputs)
        if "conv_state" in inputs.held():
            assert torch.equal(inputs.conv_state[slots], self.reference.conv_state[slots])
        assert_within_budget(
            inputs.state[slots], self.exact.state[slots], self.reference.state[slots]
        )


@cache
def expect(family: Family, case: Any, dtype: torch.dtype) -> Expected:
    """What a family's reference makes of a case."""
    inputs = family.make_inputs(case, dtype)
    exact, own = inputs.exact(), inputs.copy()
    return Expected(
        inputs=inputs,
        exact=exact,
        out_exact=family.by_reference(exact),
        reference=own,
        out_reference=family.by_reference(own),
    )


class StepContract:
    """The tests; a family's own class names the family and adds what is peculiar to it.

    Attributes:
        family: the step.
    """

    family: ClassVar[Family]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = impls_on(DEVICE, self.family.implementations)
        takes = {n: self.family.implementations[n].capability.features for n in names}
        kinds = {
            "extend_impl": [n for n in names if takes[n] >= EXTEND and n != COMPOSED],
            "impl": names,
            # They read offsets; "composed" takes all.
            "host_impl": [n for n in names if "triton" not in n and n != COMPOSED],
            "native_impl": ["cpp"],
        }
        for kind, members in kinds.items():
            if kind in metafunc.fixturenames:
                metafunc.parametrize(kind, self._parameters(members))
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.family.cases.values(), ids=self.family.cases)

    def _parameters(self, names: Iterable[str]) -> list[object]:
        reasons = {n: skip_reason(self.family.implementations[n], DEVICE) for n in names}
        return [
            pytest.param(name, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
            for name, reason in reasons.items()
        ]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_it_is_as_exact_as_the_reference(self, impl: str, case: Any, dtype: torch.dtype):
        expected = expect(self.family, case, dtype)
        inputs = expected.inputs.copy()
        expected.check(self.family.run(inputs, impl), inputs)

    def test_it_is_as_exact_in_fp16(self):
        expected = expect(self.family, self.family.cases["mixed"], torch.float16)
        inputs = expected.inputs.copy()
        expected.check(self.family.run(inputs, "torch"), inputs)

    def test_sequences_of_several_tokens_are_refused(self, host_impl: str):
        inputs = self.family.mixed(lengths=(1, 2), num_padding_tokens=0)
        told = r"must have one token or none, got lengths \[1, 2\]"
        if self.family.implementations[host_impl].capability.features >= EXTEND:
            inputs = replace(inputs, state_indices=inputs.state_indices * 0)
            told = r"must have a slot in state_indices, got 0 for lengths \[1, 2\]"
        before = inputs.copy()
        with pytest.raises(ValueError, match=told):
            self.family.run(inputs, host_impl)
        assert_same_pools(inputs, before)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_several_tokens_are_steps_one_after_the_other(
        self, extend_impl: str, case: Any, dtype: torch.dtype
    ):
        """Bit by bit, of sequences that are longer than what a thread takes at once."""
        inputs = self.family.make_inputs(replace(case, lengths=LENGTHS), dtype)
        one_by_one = inputs.copy()
        out = self.family.run(inputs, extend_impl)
        own = run_one_by_one(one_by_one, lambda now: self.family.run(now, extend_impl))
        assert torch.equal(out[: len(own)], own)
        assert_same_pools(inputs, one_by_one)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_several_tokens_are_as_exact_when_they_are_composed(
        self, case: Any, dtype: torch.dtype
    ):
        """Torch's elementwise code between the ops does not give all rows the same bits."""
        inputs = self.family.make_inputs(replace(case, lengths=LENGTHS), dtype)
        exact, own = inputs.exact(), inputs.copy()
        out_exact, out_own = (run_one_by_one(x, self.family.by_reference) for x in (exact, own))
        out = self.family.run(inputs, COMPOSED)
        assert_within_budget(out[: len(out_own)], out_exact, out_own)
        slots = written_slots(inputs)
        assert_within_budget(inputs.state[slots], exact.state[slots], own.state[slots])


def run_one_by_one(inputs: Any, run: Callable[[Any], Tensor]) -> Tensor:
    """The outputs of sequences of ``LENGTHS``, by a step for each of their tokens."""
    lengths, starts = torch.tensor(LENGTHS), inputs.cu_seqlens[:-1].long()
    outs = []
    for step in range(max(LENGTHS)):
        rows, slots = (starts + step)[lengths > step], inputs.state_indices
        now = replace(
            inputs,
            **inputs.tokens(rows),
            cu_seqlens=offsets((lengths > step).int().tolist()),
            initial_indices=slots if step else inputs.initial_indices,
        )
        outs.append((rows, run(now)))
    out = outs[0][1].new_empty(sum(LENGTHS), outs[0][1].shape[1])
    for rows, own in outs:
        out[rows] = own
    return out


def assert_same_pools(actual: Inputs, expected: Inputs) -> None:
    others = expected.held()
    for name, pool in actual.held().items():
        torch.testing.assert_close(pool, others[name], rtol=0, atol=0, equal_nan=True)
