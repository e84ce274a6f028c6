"""Inputs of ngram_embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.declared import DeclaredInputs
from tests.ops.pages import offsets
from torch_hybrid.ops.ngram_embedding.op import NgramEmbedding

EOS = 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """The largest n-gram, heads of each order, width of a row, and new tokens of each sequence."""

    order: int = 3
    heads_per_order: int = 8
    dim: int = 12
    lengths: tuple[int, ...]
    num_new: int = 0  # of the sequences, the first, that have no tokens before these


@dataclass(slots=True, kw_only=True)
class Inputs(DeclaredInputs, NgramEmbedding):
    """The arguments of one call."""

    eos: int = EOS
    impl: str = ""


CASES = {
    "decode": Case(lengths=(1,) * 9, num_new=2),
    "mixed": Case(lengths=(5, 0, 1, 70, 3, 2, 64), num_new=3),
    "bigrams": Case(order=2, heads_per_order=1, dim=3, lengths=(1, 9, 2)),
    "five_tokens": Case(order=5, heads_per_order=3, dim=40, lengths=(1, 2, 3, 4, 9), num_new=1),
    "qwen4_exp": Case(dim=128, lengths=(1, 33, 1)),
}


def make_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, padding: tuple[int, int] = (0, 0)
) -> Inputs:
    """Random tokens, a sixth of which end a text. The history of slots that nobody goes on from is
    of tokens that are none."""
    rng = torch.Generator().manual_seed(0)
    num_seqs, num_heads = len(case.lengths), (case.order - 1) * case.heads_per_order
    head_sizes = torch.tensor([101, 103, 107, 109])[torch.arange(num_heads) % 4]
    head_offsets = torch.tensor([0, *head_sizes.tolist()]).cumsum(0)
    tokens = torch.randint(5, 11, (sum(case.lengths) + padding[0],), generator=rng)
    slots = torch.randperm(num_seqs + 2, generator=rng)[:num_seqs] + 1
    initial = slots.where(torch.arange(num_seqs) >= case.num_new, 0)
    history = torch.full((num_seqs + 3, case.order - 1), -(10**9))
    going_on = initial[initial > 0]
    shape = (len(going_on), case.order - 1)
    history[going_on] = torch.randint(5, 11, shape, generator=rng)
    none = [0] * padding[1]
    return Inputs(
        tokens=tokens,
        table=torch.randn(int(head_offsets[-1]), case.dim, generator=rng).to(dtype),
        multipliers=torch.randint(1, 1 << 40, (case.order,), generator=rng) * 2 + 1,
        head_sizes=head_sizes,
        head_offsets=head_offsets[:-1].clone(),
        history=history,
        cu_seqlens=offsets([*case.lengths, *none]),
        initial_indices=torch.tensor([*initial.tolist(), *none]).int(),
        state_indices=torch.tensor([*slots.tolist(), *none]).int(),
    )
