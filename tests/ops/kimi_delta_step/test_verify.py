"""What every implementation of a step that verifies drafts is held to, of Kimi delta attention."""

from __future__ import annotations

from functools import partial

from tests.ops.kimi_delta_step.family import FAMILY
from tests.ops.verify_contract import VerifyContract
from torch_hybrid.ops.delta_step import verify_by_delta_steps
from torch_hybrid.ops.kimi_delta_step import kimi_delta_verify
from torch_hybrid.ops.kimi_delta_step.op import VERIFY_IMPLEMENTATIONS
from torch_hybrid.ops.kimi_delta_step.reference import kimi_delta_step_reference


class TestContract(VerifyContract):
    family = FAMILY
    verify = kimi_delta_verify
    implementations = VERIFY_IMPLEMENTATIONS
    recorded = ("qkv", "b", "a")
    by_reference = partial(verify_by_delta_steps, kimi_delta_step_reference)
