"""Sequences laid out in shuffled pages and slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the rows of a batch are.

    ``prefix_slots`` are the slots that hold a row before the call, those of empty sequences
    included; page 0 is null, the last page and two others are of nobody.
    """

    num_pages: int
    cu_seqlens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    prefix_slots: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of sequences whose states are in slots: base of the cases of recurrences."""

    lengths: tuple[int, ...]
    num_padding_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) + self.num_padding_tokens

    @property
    def num_slots(self) -> int:
        """Slots of a pool: the null slot, those of the sequences, and two of nobody."""
        return len(self.lengths) + 3


def lay_out(
    lengths: Sequence[tuple[int, int]],
    page_size: int,
    generator: torch.Generator,
    padding: tuple[int, int] = (0, 0),
) -> Layout:
    """Lay out sequences of (new tokens, total length).

    Args:
        lengths: of each sequence.
        page_size: rows of a page.
        generator: of the page order.
        padding: tokens and (empty) sequences to append.
    """
    num_seqs = len(lengths)
    pages = [math.ceil(total / page_size) for _, total in lengths]
    num_pages = sum(pages) + 4
    order = (torch.randperm(num_pages - 2, generator=generator) + 1).split([*pages, 2])
    page_table = torch.full((num_seqs + padding[1], max(pages) + 2), num_pages - 1)
    page_table[num_seqs:] = 0
    prefix_slots, new_slots = [], []
    for n, (new, total) in enumerate(lengths):
        page_table[n, : pages[n]] = order[n]
        own = slots_of(page_table[n], total, page_size)
        prefix_slots.append(own[: total - new])
        new_slots.append(own[total - new :])
    padding_slots = torch.zeros(padding[0], dtype=torch.int64)
    return Layout(
        num_pages=num_pages,
        cu_seqlens=offsets([new for new, _ in lengths] + [0] * padding[1]),
        seq_lens=torch.tensor([total for _, total in lengths] + [0] * padding[1]).int(),
        page_table=page_table.int(),
        prefix_slots=torch.cat(prefix_slots),
        slot_mapping=torch.cat([*new_slots, padding_slots]).int(),
    )


def slots_of(pages: Tensor, length: int, page_size: int) -> Tensor:
    """Where the first ``length`` positions of a sequence with these pages are."""
    position = torch.arange(length)
    return pages.long()[position // page_size] * page_size + position % page_size


def offsets(counts: Sequence[int]) -> Tensor:
    """``cu_seqlens`` of sequences with these numbers of tokens."""
    return torch.tensor([0, *counts]).cumsum(0).int()


def in_slots(
    lengths: Sequence[int], generator: torch.Generator, *pools: Tensor
) -> dict[str, Tensor]:
    """Give each sequence a slot of the pools, of which one in three is a new sequence's.

    Slots that no sequence starts from become NaN: those of new sequences, and the null slot.

    Returns:
        Offsets, initial indices and state indices, by name.
    """
    state_indices = 1 + torch.randperm(len(pools[0]) - 2, generator=generator)[: len(lengths)]
    is_new = torch.arange(len(lengths)) % 3 == 1
    for pool in pools:
        pool[state_indices[is_new]] = torch.nan
        pool[0] = torch.nan
    return {
        "cu_seqlens": offsets(lengths),
        "initial_indices": torch.where(is_new, 0, state_indices).int(),
        "state_indices": state_indices.int(),
    }
