"""Page tables: the pages of each sequence, as steps read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_hybrid.caches.sequence import SequenceState
from torch_hybrid.host.ints import int_tensor


class PageTable:
    """Host table with a row of page ids per sequence, by its place; 0 after its last page.

    Args:
        max_seqs: number of rows.
        num_pages: the most pages of one sequence.
    """

    def __init__(self, max_seqs: int, num_pages: int) -> None:
        # At least two pages wide: a graph that saw a single one would serve no other width.
        width = max(num_pages, 2)
        self._rows = torch.zeros(max_seqs, width, dtype=torch.int32, device="cpu")

    def row(self, held: SequenceState) -> Tensor:
        """Return the whole row of a sequence."""
        return self._rows[held.place - 1]

    def rows(self, owners: Sequence[SequenceState], width: Callable[[int], int]) -> Tensor:
        """Gather the rows of N sequences [N, width(the most pages of one)] int32."""
        used = max(len(held.pages) for held in owners)
        if len(owners) == 1:
            return self.row(owners[0])[None, : width(used)]
        rows = int_tensor([held.place - 1 for held in owners], torch.int64)
        return self._rows[:, : width(used)].index_select(0, rows)
