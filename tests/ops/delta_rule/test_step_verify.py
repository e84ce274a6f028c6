"""What every implementation of delta rules' steps that verify drafts is held to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI
from tests.ops.verify_contract import VerifyContract
from torch_hybrid.ops.delta_rule.op_step import DeltaStep
from torch_hybrid.ops.verify import verify_by_calls


def verify_by_delta_steps(step: Callable[[Any], Tensor], x: DeltaStep) -> Tensor:
    """Drafts by calls of a decode step."""
    return verify_by_calls(step, x, torch.zeros_like(x.z, memory_format=torch.contiguous_format))


class TestGated(VerifyContract):
    family = GATED
    by_reference = partial(verify_by_delta_steps, GATED.reference)


class TestKimi(VerifyContract):
    family = KIMI
    by_reference = partial(verify_by_delta_steps, KIMI.reference)
