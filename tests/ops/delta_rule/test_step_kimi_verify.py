"""What every implementation of a step that verifies drafts is held to, of Kimi delta attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.ops.delta_rule.step_kimi_family import FAMILY
from tests.ops.verify_contract import VerifyContract
from torch_hybrid.ops.delta_rule import kimi_delta_step
from torch_hybrid.ops.delta_rule.op_step import verify_by_delta_steps
from torch_hybrid.ops.delta_rule.op_step_kimi import IMPLEMENTATIONS, KimiDeltaStep
from torch_hybrid.ops.delta_rule.reference_step_kimi import kimi_delta_step_reference


def by_reference(*tensors: Tensor | None, **options: Any) -> Tensor:
    *of_step, records, accepted = tensors
    drafts = {"records": records, "accepted": accepted}
    x = KimiDeltaStep(*of_step, **options, **drafts, impl="reference")
    return verify_by_delta_steps(kimi_delta_step_reference, x)


class TestContract(VerifyContract):
    family = FAMILY
    verify = kimi_delta_step
    implementations = IMPLEMENTATIONS
    recorded = ("qkv", "b", "a")
    by_reference = by_reference
