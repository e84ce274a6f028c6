"""What every implementation of a recurrence is held to whose state is a few numbers a channel, and
which one op walks whether tokens are many or few."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.ops.contract import (
    impls_on,
    skip_reason,
)
from tests.ops.pages import offsets
from tests.ops.recurrent_contract import AnyInputs, Expected, pool_of
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, Implementation

DEVICE = "cpu"


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A recurrence: its op, its oracle, its inputs, and the cases whose sequence is cut."""

    op: Callable[..., Tensor]
    implementations: Mapping[str, Implementation]
    reference: Callable[..., Tensor]
    cases: Mapping[str, Any]
    make_inputs: Callable[..., Any]
    cut: tuple[str, ...] = ("mixed",)

    def run(self, inputs: AnyInputs, impl: str) -> Tensor:
        return self.op(*inputs.args(), **inputs.options(), impl=impl)

    def expect(self, inputs: AnyInputs) -> Expected:
        return Expected.of(self.reference, inputs)

    @cache  # noqa: B019  (a few families live as long as the process)
    def expect_case(self, case: Any, dtype: torch.dtype) -> Expected:
        return self.expect(self.make_inputs(case, dtype))


class VectorStateContract:
    """The tests; a family's own class names the family and adds what is peculiar to it."""

    family: ClassVar[Family]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        implementations = self.family.implementations
        if "impl" in metafunc.fixturenames:
            impls = [
                pytest.param(
                    name,
                    marks=pytest.mark.skipif(reason is not None, reason=reason or "it runs here"),
                )
                for name in impls_on(DEVICE, implementations)
                for reason in [skip_reason(implementations[name], DEVICE)]
            ]
            metafunc.parametrize("impl", impls)
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.family.cases.values(), ids=self.family.cases)
        if "cut" in metafunc.fixturenames:
            metafunc.parametrize("cut", self.family.cut)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_it_is_as_exact_as_the_reference(self, impl: str, case: Any, dtype: torch.dtype):
        expected = self.family.expect_case(case, dtype)
        inputs = expected.inputs.copy()
        expected.check(self.family.run(inputs, impl), pool_of(inputs))

    def test_segments_are_the_whole(self, impl: str, cut: str):
        """Cutting a sequence anywhere changes nothing, nor does where a new one begins."""
        run = self.family.run
        case = replace(self.family.cases[cut], lengths=(150,), num_padding_tokens=0)
        whole = self.family.make_inputs(case)
        for initial in (whole.initial_indices, whole.initial_indices * 0):
            uncut, segmented = (replace(whole.copy(), initial_indices=initial) for _ in range(2))
            outs = []
            for start, end in [(0, 1), (1, 3), (3, 50), (50, 52), (52, 150)]:
                piece = replace(
                    segmented,
                    **whole.tokens(slice(start, end)),
                    cu_seqlens=offsets([end - start]),
                    initial_indices=whole.state_indices if start else initial,
                )
                outs.append(run(piece, impl))
            expected, slots = run(uncut, impl), whole.state_indices
            torch.testing.assert_close(torch.cat(outs), expected)
            torch.testing.assert_close(pool_of(segmented)[slots], pool_of(uncut)[slots])
            if BATCH_INVARIANT in self.family.implementations[impl].capability.features:
                assert torch.equal(torch.cat(outs), expected)
                assert torch.equal(pool_of(segmented)[slots], pool_of(uncut)[slots])
