"""What every implementation of a step that verifies drafts is held to, of Mamba2."""

from __future__ import annotations

from functools import partial

from tests.ops.ssd_step.family import FAMILY
from tests.ops.verify_contract import VerifyContract
from torch_hybrid.ops.ssd_step import ssd_verify
from torch_hybrid.ops.ssd_step.by_steps import verify_by_ssd_steps
from torch_hybrid.ops.ssd_step.op import VERIFY_IMPLEMENTATIONS
from torch_hybrid.ops.ssd_step.reference import ssd_step_reference


class TestContract(VerifyContract):
    family = FAMILY
    verify = ssd_verify
    implementations = VERIFY_IMPLEMENTATIONS
    recorded = ("xBC", "dt")
    by_reference = partial(verify_by_ssd_steps, ssd_step_reference)
    test_records_go_with_counts = None  # the op cannot be called without
