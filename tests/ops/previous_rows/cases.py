"""Inputs of previous_rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.declared import DeclaredInputs
from tests.ops.pages import offsets
from torch_hybrid.ops.previous_rows.op import PreviousRows


@dataclass(frozen=True, kw_only=True)
class Case:
    """New tokens of each sequence, of which the first few begin with them."""

    lengths: tuple[int, ...]
    width: int = 24
    num_new: int = 0


@dataclass(slots=True, kw_only=True)
class Inputs(DeclaredInputs, PreviousRows):
    """The arguments of one call."""

    impl: str = ""


CASES = {
    "decode": Case(lengths=(1,) * 9, num_new=2),
    "verify": Case(lengths=(1, 4, 3, 0, 0, 0, 5, 2), num_new=1),
    "mixed": Case(lengths=(5, 0, 1, 70, 3, 7, 64, 8, 9), num_new=3),
    "wide": Case(lengths=(300, 1), width=300),
}
NUM_KEPT = 8


def make_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, padding: tuple[int, int] = (0, 0)
) -> Inputs:
    """Random rows. Some sequences leave theirs in another slot than they go on from; slots that
    nobody goes on from, the null one too, hold NaN."""
    rng = torch.Generator().manual_seed(0)
    num_seqs = len(case.lengths)
    slots = torch.randperm(2 * num_seqs, generator=rng) + 1
    state, other = slots[:num_seqs], slots[num_seqs:]
    goes_on = torch.arange(num_seqs) >= case.num_new
    moves = torch.arange(num_seqs) % 3 == 2
    initial = torch.where(moves, other, state).where(goes_on, 0)
    past = torch.randint(1, 40, (num_seqs,), generator=rng).where(goes_on, 0)
    shape = (2 * num_seqs + 1, NUM_KEPT)
    kept = torch.full((*shape, case.width), torch.nan)
    going_on = initial[initial > 0]
    kept[going_on] = torch.randn(len(going_on), NUM_KEPT, case.width, generator=rng)
    num_tokens = sum(case.lengths) + padding[0]
    none = [0] * padding[1]
    return Inputs(
        x=torch.randn(num_tokens, case.width, generator=rng).to(dtype),
        tokens=torch.randint(0, 1000, (num_tokens,), generator=rng),
        kept=kept.to(dtype),
        kept_tokens=torch.randint(0, 1000, shape, generator=rng),
        cu_seqlens=offsets([*case.lengths, *none]),
        seq_lens=torch.tensor([*(past + torch.tensor(case.lengths)).tolist(), *none]).int(),
        initial_indices=torch.tensor([*initial.tolist(), *none]).int(),
        state_indices=torch.tensor([*state.tolist(), *none]).int(),
    )
