"""Inputs of paged_attention: real model shapes and odd small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """Heads, pages, and for each sequence its (new tokens, total length)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    lengths: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of one call, in the op's order."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor

    def args(self) -> tuple[Tensor, ...]:
        """The positional arguments; ``kv`` is a copy, so that a call leaves the inputs alone."""
        index = (self.cu_seqlens, self.seq_lens, self.page_table, self.slot_mapping)
        return self.q, self.k, self.v, self.kv.clone(), *index

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype."""
        tensors = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "kv")}
        return replace(self, **tensors)


CASES = {
    "qwen3_next": Case(
        num_q_heads=16, num_kv_heads=2, head_dim=256, lengths=((1, 70), (19, 19), (1, 1), (3, 40))
    ),
    "qwen3": Case(num_q_heads=16, num_kv_heads=8, head_dim=128, lengths=((1, 33), (5, 21))),
    "olmo_hybrid": Case(num_q_heads=5, num_kv_heads=5, head_dim=128, lengths=((17, 17), (1, 17))),
    "one_head": Case(
        num_q_heads=1, num_kv_heads=1, head_dim=16, page_size=1, lengths=((7, 7), (0, 5), (1, 3))
    ),
    "odd": Case(
        num_q_heads=3,
        num_kv_heads=1,
        head_dim=80,
        page_size=5,
        lengths=((0, 0), (13, 37), (1, 11), (2, 2)),
    ),
    "long_decode": Case(
        num_q_heads=4, num_kv_heads=2, head_dim=64, lengths=((1, 1500), (1, 260), (1, 2))
    ),
    "long_extend": Case(
        num_q_heads=2, num_kv_heads=1, head_dim=64, lengths=((131, 131), (65, 150))
    ),
}

OPTIONS = {
    "plain": {"window": 0, "softcap": 0.0},
    "window": {"window": 9, "softcap": 0.0},
    "softcap": {"window": 0, "softcap": 2.0},
    "window_softcap": {"window": 40, "softcap": 30.0},
}


def make_inputs(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    unused: float = math.nan,
    padding: tuple[int, int] = (0, 0),
) -> Inputs:
    """Random inputs with shuffled pages.

    Args:
        case: the shapes.
        dtype: of q, k, v and kv.
        seed: of the values and of the page order.
        unused: what every row of kv holds that no query may see: the null page, the last page,
            pages of nobody, rows past the end of a sequence.
        padding: tokens and (empty) sequences to append.
    """
    generator = torch.Generator().manual_seed(seed)
    num_seqs, num_tokens = len(case.lengths), sum(new for new, _ in case.lengths)
    pages = [math.ceil(total / case.page_size) for _, total in case.lengths]
    num_pages = sum(pages) + 4  # the null page, two of nobody, the last one of nobody
    order = (torch.randperm(num_pages - 2, generator=generator) + 1).split([*pages, 2])
    page_table = torch.full((num_seqs + padding[1], max(pages) + 2), num_pages - 1)
    for n, own in enumerate(order[:-1]):
        page_table[n, : len(own)] = own
    page_table[num_seqs:] = 0

    heads, dim = case.num_kv_heads, case.head_dim
    kv = torch.full((2, num_pages, case.page_size, heads, dim), unused)
    slots = []
    for n, (new, total) in enumerate(case.lengths):
        own = slots_of(page_table[n], total, case.page_size)
        prefix = own[: total - new] if new else own
        kv.flatten(1, 2)[:, prefix] = torch.randn(2, len(prefix), heads, dim, generator=generator)
        slots.append(own[len(prefix) :])
    rows = num_tokens + padding[0]
    q, k, v = (
        torch.randn(rows, count, dim, generator=generator)
        for count in (case.num_q_heads, heads, heads)
    )
    slot_mapping = torch.cat([*slots, torch.zeros(padding[0], dtype=torch.int64)])
    return Inputs(
        q=q,
        k=k,
        v=v,
        kv=kv,
        cu_seqlens=offsets([new for new, _ in case.lengths] + [0] * padding[1]),
        seq_lens=torch.tensor([total for _, total in case.lengths] + [0] * padding[1]).int(),
        page_table=page_table.int(),
        slot_mapping=slot_mapping.int(),
    ).to(dtype)


def slots_of(pages: Tensor, length: int, page_size: int) -> Tensor:
    """Where the first ``length`` positions of a sequence with these pages are."""
    position = torch.arange(length)
    return pages.long()[position // page_size] * page_size + position % page_size


def offsets(counts: Sequence[int]) -> Tensor:
    """``cu_seqlens`` of sequences with these numbers of new tokens."""
    return torch.tensor([0, *counts]).cumsum(0).int()
