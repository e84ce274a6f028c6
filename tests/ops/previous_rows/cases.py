"""Inputs of previous_rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.pages import offsets


@dataclass(frozen=True, kw_only=True)
class Case:
    """New tokens of each sequence; with ``accepted``, of a step that verifies drafts."""

    lengths: tuple[int, ...]
    accepted: tuple[int, ...] | None = None
    width: int = 24
    num_new: int = 0  # of the sequences, the first, that have no tokens before these


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of one call, in the op's order."""

    x: Tensor
    last: Tensor
    records: Tensor | None
    cu_seqlens: Tensor
    initial_indices: Tensor
    state_indices: Tensor
    accepted: Tensor | None

    def args(self) -> tuple[Tensor | None, ...]:
        """The positional arguments; the pools are copies."""
        records = None if self.records is None else self.records.clone()
        index = (self.cu_seqlens, self.initial_indices, self.state_indices, self.accepted)
        return self.x, self.last.clone(), records, *index


CASES = {
    "decode": Case(lengths=(1,) * 9, num_new=2),
    "mixed": Case(lengths=(5, 0, 1, 70, 3, 2, 64), num_new=3),
    "wide": Case(lengths=(300, 1), width=300),
    "verify": Case(lengths=(1, 4, 3, 0, 0, 1, 2), accepted=(0, 0, 3, 2, 0, 1, 3), num_new=1),
}
NUM_RECORDS = 3


def make_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, padding: tuple[int, int] = (0, 0)
) -> Inputs:
    """Random rows. Some sequences leave theirs in another slot than they go on from; slots that
    nobody goes on from, the null one too, hold NaN."""
    rng = torch.Generator().manual_seed(0)
    num_seqs = len(case.lengths)
    slots = torch.randperm(2 * num_seqs, generator=rng) + 1
    state, other = slots[:num_seqs], slots[num_seqs:]
    moves = torch.arange(num_seqs) % 3 == 2
    initial = torch.where(moves, other, state).where(torch.arange(num_seqs) >= case.num_new, 0)
    shape = (2 * num_seqs + 1, 1 + NUM_RECORDS, case.width)
    pools = torch.full(shape, torch.nan)
    going_on = initial[initial > 0]
    pools[going_on] = torch.randn(len(going_on), *shape[1:], generator=rng)
    x = torch.randn(sum(case.lengths) + padding[0], case.width, generator=rng)
    none = [0] * padding[1]
    is_verify = case.accepted is not None
    return Inputs(
        x=x.to(dtype),
        last=pools[:, 0].to(dtype).contiguous(),
        records=pools[:, 1:].to(dtype).contiguous() if is_verify else None,
        cu_seqlens=offsets([*case.lengths, *none]),
        initial_indices=torch.tensor([*initial.tolist(), *none]).int(),
        state_indices=torch.tensor([*state.tolist(), *none]).int(),
        accepted=torch.tensor([*case.accepted, *none]).int() if is_verify else None,
    )
