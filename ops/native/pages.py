"""The index arguments of a kernel over pages, as pages.h takes them."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

# Mirror of ``th::Pages``.
PAGES_FIELDS: tuple[tuple[str, type[ctypes._SimpleCData[Any]]], ...] = (
    *((name, ctypes.c_void_p) for name in ("cu_seqlens", "seq_lens", "page_table")),
    ("slot_mapping", ctypes.c_void_p),
    *((name, ctypes.c_int64) for name in ("page_table_row", "num_tokens", "num_seqs")),
    *((name, ctypes.c_int64) for name in ("num_pages", "page_size", "max_pages")),
)


def pages_values(
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    num_pages: int,
    page_size: int,
) -> tuple[int, ...]:
    """The values of PAGES_FIELDS; the tensors must outlive the call."""
    return (
        cu_seqlens.data_ptr(),
        seq_lens.data_ptr(),
        page_table.data_ptr(),
        slot_mapping.data_ptr(),
        page_table.stride(0),
        slot_mapping.shape[0],
        seq_lens.shape[0],
        num_pages,
        page_size,
        page_table.shape[1],
    )
