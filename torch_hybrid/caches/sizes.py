"""Sizes of a model's pools, and the cost of a layer's pools."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Sizes that all pools of a cache share. Page 0 and slot 0 come on top of the counts."""

    num_pages: int
    page_size: int
    num_slots: int  # of sequences
    dtype: torch.dtype
    device: torch.device
    num_snapshots: int = 0  # further slots, of snapshots
    num_drafts: int = 0  # the most drafts of a sequence
    opens_chunks: bool = False  # decode keeps chunks open, where layers have such a form


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCost:
    """Bytes that a token, a sequence of any length, and the layer take in a layer's pools."""

    per_token: int = 0
    per_sequence: int = 0
    per_layer: int = 0
