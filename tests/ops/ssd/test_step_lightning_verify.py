"""What every implementation of a step that verifies drafts is held to, of lightning attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ops.ssd.step_lightning_family import FAMILY
from tests.ops.verify_contract import MOST_DRAFTS, VerifyContract
from torch_hybrid.ops.ssd import lightning_step
from torch_hybrid.ops.ssd.op_step_lightning import IMPLEMENTATIONS, LightningStep
from torch_hybrid.ops.ssd.reference_step_lightning import lightning_step_reference


def by_reference(*tensors: Tensor | None, **options: Any) -> Tensor:
    *of_step, records, accepted = tensors
    drafts = {"records": records, "accepted": accepted}
    x = LightningStep(*of_step, **options, **drafts, impl="reference")
    return lightning_step_reference(x)


class TestContract(VerifyContract):
    family = FAMILY
    verify = lightning_step
    implementations = IMPLEMENTATIONS
    records_are_inputs = False
    by_reference = by_reference

    def empty_records(self, inputs: Any) -> Tensor:
        """Of k and v as the recurrence takes them."""
        num_slots, num_heads, dim, _ = inputs.state.shape
        return inputs.state.new_full((num_slots, MOST_DRAFTS, 2 * num_heads * dim), torch.nan)
