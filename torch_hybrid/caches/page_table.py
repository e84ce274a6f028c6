"""Which pages each sequence owns, as steps read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_hybrid.caches.sequence import SequenceState
from torch_hybrid.host.ints import int_tensor


class PageTable:
    """A row for each sequence, by its place, on the host; 0 beyond the pages that it owns.

    Args:
        max_seqs: how many.
        num_pages: that one of them can own.
    """

    def __init__(self, max_seqs: int, num_pages: int) -> None:
        # At least two pages wide: a graph that saw a single one would serve no other width.
        width = max(num_pages, 2)
        self._rows = torch.zeros(max_seqs, width, dtype=torch.int32, device="cpu")

    def row(self, held: SequenceState) -> Tensor:
        """A sequence's row, all of it."""
        return self._rows[held.place - 1]

    def rows(self, owners: Sequence[SequenceState], width: Callable[[int], int]) -> Tensor:
        """[N, width(most pages that one owns)] int32."""
        used = max(len(held.pages) for held in owners)
        if len(owners) == 1:
            return self.row(owners[0])[None, : width(used)]
        rows = int_tensor([held.place - 1 for held in owners], torch.int64)
        return self._rows[:, : width(used)].index_select(0, rows)
