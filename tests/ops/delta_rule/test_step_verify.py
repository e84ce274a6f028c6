"""What every implementation of delta rules' steps that verify drafts is held to."""

from __future__ import annotations

from functools import partial

from tests.ops.delta_rule.step_gated_family import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_family import FAMILY as KIMI
from tests.ops.verify_contract import VerifyContract
from torch_hybrid.ops.delta_rule.op_step import verify_by_delta_steps


class TestGated(VerifyContract):
    family = GATED
    recorded = ("qkv", "b", "a")
    by_reference = partial(verify_by_delta_steps, GATED.reference)


class TestKimi(VerifyContract):
    family = KIMI
    recorded = ("qkv", "b", "a")
    by_reference = partial(verify_by_delta_steps, KIMI.reference)
