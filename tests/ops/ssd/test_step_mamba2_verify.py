"""What every implementation of a step that verifies drafts is held to, of Mamba2."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.ops.ssd.step_mamba2_family import FAMILY
from tests.ops.verify_contract import VerifyContract
from torch_hybrid.ops.ssd import ssd_step
from torch_hybrid.ops.ssd._torch_step_mamba2 import verify_by_ssd_steps
from torch_hybrid.ops.ssd.op_step_mamba2 import IMPLEMENTATIONS, SsdStep
from torch_hybrid.ops.ssd.reference_step_mamba2 import ssd_step_reference


def by_reference(*tensors: Tensor | None, **options: Any) -> Tensor:
    *of_step, records, accepted = tensors
    drafts = {"records": records, "accepted": accepted}
    x = SsdStep(*of_step, **options, **drafts, impl="reference")
    return verify_by_ssd_steps(ssd_step_reference, x)


class TestContract(VerifyContract):
    family = FAMILY
    verify = ssd_step
    implementations = IMPLEMENTATIONS
    recorded = ("xBC", "dt")
    by_reference = by_reference
