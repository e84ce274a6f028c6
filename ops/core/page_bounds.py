"""Ops on pages, and the check of their index tensors, for indices that are on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torch_hybrid.ops.core.declare import Op


class PagedOp(Op):
    """Op on pages of a pool, of which a table names those of each sequence.

    Args:
        cu_seqlens: [N + 1] int32, offsets of each sequence's new tokens, from 0.
        seq_lens: [N] int32, total length of each sequence, new tokens included.
        page_table: [N, max_pages] int32; entry j holds positions ``[j * page_size, (j + 1) *
            page_size)``. Entries that no query sees are never read.
        slot_mapping: [T] int32, ``page * page_size + offset`` of each new token.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        cu_seqlens: Tensor
        seq_lens: Tensor
        page_table: Tensor
        slot_mapping: Tensor

    def check_pages(self, num_pages: int, page_size: int, window: int = 0) -> None:
        """Raise ValueError unless every index that a call uses is inside its pool.

        Page 0 is null, so neither a new token nor a visible key may be there.
        """
        offsets, lengths = self.cu_seqlens.tolist(), self.seq_lens.tolist()
        tables, slots = self.page_table.tolist(), self.slot_mapping
        if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > slots.shape[0]:
            raise ValueError(
                f"cu_seqlens must rise from 0 to at most {slots.shape[0]}, got {offsets}"
            )
        for slot in slots[: offsets[-1]].tolist():
            if not page_size <= slot < num_pages * page_size:
                raise ValueError(
                    f"slot_mapping must be in [{page_size}, {num_pages * page_size}), got {slot}"
                )
        capacity = self.page_table.shape[1] * page_size
        for n, length in enumerate(lengths):
            num_new = offsets[n + 1] - offsets[n]
            if not num_new:
                continue
            if not num_new <= length <= capacity:
                raise ValueError(f"seq_lens[{n}] must be in [{num_new}, {capacity}], got {length}")
            first = max(0, length - num_new - window + 1) if window else 0
            for page in tables[n][first // page_size : -(-length // page_size)]:
                if not 1 <= page < num_pages:
                    raise ValueError(f"page_table[{n}] must be in [1, {num_pages}), got {page}")
