"""How large a model's pools are, and what a layer's pool costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """What every pool of a cache agrees on. Page 0 and slot 0 come on top of the counts."""

    num_pages: int
    page_size: int
    num_slots: int  # of sequences
    dtype: torch.dtype
    device: torch.device
    num_snapshots: int = 0  # slots of snapshots, after those
    num_drafts: int = 0  # of a sequence, which are not certain


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCost:
    """Bytes that one token, one sequence whatever its length, and the layer takes in its pools."""

    per_token: int = 0
    per_sequence: int = 0
    per_layer: int = 0
