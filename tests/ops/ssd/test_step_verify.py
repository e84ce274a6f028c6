"""What every implementation of a step that verifies drafts is held to, of Mamba2 and of lightning
attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ops.ssd.step_lightning_cases import FAMILY as LIGHTNING
from tests.ops.ssd.step_mamba2_cases import FAMILY as MAMBA2
from tests.ops.verify_contract import MOST_DRAFTS, VerifyContract
from torch_hybrid.ops.ssd._torch_step_mamba2 import verify_by_ssd_steps


class TestMamba2(VerifyContract):
    family = MAMBA2
    recorded = ("xBC", "dt")
    by_reference = partial(verify_by_ssd_steps, MAMBA2.reference)


class TestLightning(VerifyContract):
    family = LIGHTNING
    records_are_inputs = False
    by_reference = LIGHTNING.reference

    def empty_records(self, inputs: Any) -> Tensor:
        """Of k and v as the recurrence takes them."""
        num_slots, num_heads, dim, _ = inputs.state.shape
        return inputs.state.new_full((num_slots, MOST_DRAFTS, 2 * num_heads * dim), torch.nan)
