"""What every implementation of a step that verifies drafts is held to, of lightning attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ops.lightning_step.family import FAMILY
from tests.ops.verify_contract import MOST_DRAFTS, VerifyContract
from torch_hybrid.ops.lightning_step import lightning_verify
from torch_hybrid.ops.lightning_step.op import VERIFY_IMPLEMENTATIONS
from torch_hybrid.ops.lightning_step.reference import lightning_verify_reference


class TestContract(VerifyContract):
    family = FAMILY
    verify = lightning_verify
    implementations = VERIFY_IMPLEMENTATIONS
    records_are_inputs = False
    by_reference = lightning_verify_reference

    def empty_records(self, inputs: Any) -> Tensor:
        """Of k and v as the recurrence takes them."""
        num_slots, num_heads, dim, _ = inputs.state.shape
        return inputs.state.new_full((num_slots, MOST_DRAFTS, 2 * num_heads * dim), torch.nan)

    test_records_go_with_counts = None  # the op cannot be called without
