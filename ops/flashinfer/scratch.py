"""Buffers that FlashInfer's planners fill, pinned and on the device, and check sizes against.

A planner also copies the pinned buffer to the device, where nobody reads it: schedules travel with
a step's other inputs. The buffers are made when something is first planned.
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
    """Buffers of one device. A planner's caller holds ``lock`` until it has copied the schedule."""

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
        """Make the workspace of partial results, in which a planner finds room without writing."""
        return self.ints.new_empty(num_bytes)


def first_pages(page_table: Tensor) -> Tensor:
    """Index the beginning of each sequence's row in the flat page table [N + 1]: no table is
    packed."""
    num_seqs, width = page_table.shape
    return torch.arange(num_seqs + 1, dtype=torch.int32, device="cpu") * width
