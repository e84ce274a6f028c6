"""FlashInfer's schedules for attention to pages, made on the host; two forms.

- fa3, for prefill on Hopper: blocks of 128 queries of one head are dealt out to the processors,
  longest first. The schedule has all that is to be known of a sequence.
- fa2, for decode and for other devices: a block has the queries of all heads that share a key head,
  and sequences are cut, so that there are as many blocks as processors. It wants tables of its own:
  a list of the pages of all sequences, one after the other.

The schedules are FlashInfer's own, as its planner leaves them in a pinned buffer. They are planned
as for a CUDA graph: what they take of the buffer, and where each part begins, follows from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths, Planned
from torch_hybrid.ops.flashinfer.library import HOPPER
from torch_hybrid.ops.flashinfer.prefill import fa3_bytes, kernels
from torch_hybrid.ops.flashinfer.scratch import Scratch, first_pages

_MOST_PROCESSORS = 160  # of the GPUs there are


def takes_fa3(num_tokens: int, num_seqs: int, device: torch.device) -> bool:
    """Tell whether a step of these shapes runs in the form for prefill."""
    return num_tokens > num_seqs and torch.cuda.get_device_capability(device) in HOPPER


def plan(
    lengths: Lengths,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int,
    softcap: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Planned:
    """Make FlashInfer's schedule for a step, and tell where its parts begin.

    The tensors are the schedule and, in the form fa2, the tables of pages: offsets, pages, and how
    many rows of the last page of each sequence are in use.
    """
    num_tokens, num_seqs = lengths.num_tokens, lengths.seq_lens.shape[0]
    scratch, fa3 = Scratch.of(device), takes_fa3(num_tokens, num_seqs, device)
    num_rows = 0 if fa3 else most_partial_rows(num_tokens, num_seqs, num_q_heads, num_kv_heads)
    module = kernels("fa3" if fa3 else "fa2", dtype, head_dim, head_dim, window > 0, softcap > 0)
    tables: tuple[Tensor, ...] = () if fa3 else tables_of_pages(lengths, page_size)
    workspace = scratch.workspace(4 * num_rows * (head_dim + 1) + 64)
    with scratch.lock:
        offsets = module.plan(
            workspace,
            scratch.ints,
            scratch.pinned,
            lengths.cu_seqlens,
            first_pages(lengths.page_table) if fa3 else tables[0],
            lengths.seq_lens,
            num_tokens,
            num_seqs,
            num_q_heads,
            num_kv_heads,
            page_size,
            True,  # as for a CUDA graph
            head_dim,
            head_dim,
            True,  # causal
            window - 1,
            # How it may cut sequences: as it likes, with all processors, of any length.
            *(() if fa3 else (-1, False, 0, 0)),
        )
        values = tuple(int(offset) for offset in offsets)
        schedule = scratch.pinned[: fa3_bytes(values) if fa3 else fa2_bytes(values)].clone()
    return Planned(tensors=(schedule, *tables), values=values)


def most_partial_rows(num_tokens: int, num_seqs: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Count the rows of partial results that any lengths may have, of all heads.

    Blocks have up to 128 rows: of the tokens, each sequence's last one cut short, or as many as two
    for each processor.
    """
    of_tokens = num_tokens * num_q_heads + 128 * num_seqs * num_kv_heads
    return max(of_tokens, 128 * 2 * _MOST_PROCESSORS)


def fa2_bytes(values: Sequence[int]) -> int:
    """Count the bytes of a schedule of the form fa2: a byte for each block comes last."""
    return values[12] + values[0]


def fa2_workspace(values: Sequence[int], num_q_heads: int, head_dim: int) -> int:
    """Count the bytes of partial results: outputs from offset ``values[10]`` on, then sums."""
    outputs, sums = values[10], values[11]
    return sums + -(-(sums - outputs) // head_dim) + 16 * num_q_heads


def tables_of_pages(lengths: Lengths, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make offsets of the sequences in a list of pages, the list, and the rows of each last page.

    The list is as long as the page table, whatever the lengths.
    """
    seq_lens, table = lengths.seq_lens, lengths.page_table
    num_pages = (seq_lens + page_size - 1) // page_size
    offsets = torch.nn.functional.pad(num_pages.cumsum(0, dtype=torch.int32), (1, 0))
    in_use = torch.arange(table.shape[1], dtype=torch.int32, device="cpu") < num_pages[:, None]
    pages = torch.zeros(table.numel(), dtype=torch.int32, device="cpu")
    # An index would wake all threads for it: milliseconds now and then.
    pages[: int(offsets[-1])] = table.masked_select(in_use)
    return offsets, pages, seq_lens - (num_pages - 1).clamp(min=0) * page_size
