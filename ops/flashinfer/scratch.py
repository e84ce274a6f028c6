"""What FlashInfer's planners write to: they fill a pinned buffer, and check sizes against others.

They also start a copy of the pinned buffer to the device, which nobody reads: what was planned goes
there with the rest of a step's input. All is made when something is first planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from threading import Lock

import torch
from torch import Tensor

_INT_BYTES = 8 << 20  # as FlashInfer's own wrappers take


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Of one device. Whoever plans holds ``lock`` until what was planned is taken away."""

    ints: Tensor
    pinned: Tensor
    lock: Lock = field(default_factory=Lock)

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Scratch:
        return cls(
            ints=torch.empty(_INT_BYTES, dtype=torch.uint8, device=device),
            pinned=torch.empty(
                _INT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
            ),
        )

    def workspace(self, num_bytes: int) -> Tensor:
        """For partial results that a planner finds room for, and does not write."""
        return self.ints.new_empty(num_bytes)


def first_pages(page_table: Tensor) -> Tensor:
    """[N + 1] where each sequence's row begins in the flat table: no table is packed for it."""
    num_seqs, width = page_table.shape
    return torch.arange(num_seqs + 1, dtype=torch.int32, device="cpu") * width
