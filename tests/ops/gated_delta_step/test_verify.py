"""What every implementation of a step that verifies drafts is held to, of the gated delta rule."""

from __future__ import annotations

from functools import partial

from tests.ops.gated_delta_step.family import FAMILY
from tests.ops.verify_contract import VerifyContract
from torch_hybrid.ops.delta_step import verify_by_delta_steps
from torch_hybrid.ops.gated_delta_step import gated_delta_verify
from torch_hybrid.ops.gated_delta_step.op import VERIFY_IMPLEMENTATIONS
from torch_hybrid.ops.gated_delta_step.reference import gated_delta_step_reference


class TestContract(VerifyContract):
    family = FAMILY
    verify = gated_delta_verify
    implementations = VERIFY_IMPLEMENTATIONS
    recorded = ("qkv", "b", "a")
    by_reference = partial(verify_by_delta_steps, gated_delta_step_reference)
