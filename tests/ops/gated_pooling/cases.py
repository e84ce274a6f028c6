"""Inputs of gated_pooling."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.declared import DeclaredInputs
from tests.ops.pages import offsets
from torch_hybrid.ops.gated_pooling.op import GatedPooling


@dataclass(frozen=True, kw_only=True)
class Case:
    """Width of a key, tokens of a block, and (new tokens, total length) of each sequence."""

    dim: int = 24
    block_size: int = 4
    lengths: tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True)
class Inputs(DeclaredInputs, GatedPooling):
    """The arguments of one call."""

    impl: str = ""


CASES = {
    "decode": Case(lengths=((1, 1), (1, 4), (1, 7), (1, 8), (1, 30))),
    "mixed": Case(lengths=((5, 5), (0, 3), (1, 4), (70, 71), (3, 6), (2, 2), (64, 66))),
    "a_token_a_block": Case(dim=7, block_size=1, lengths=((3, 9), (1, 1))),
    "odd": Case(dim=37, block_size=6, lengths=((1, 12), (17, 23), (4, 4), (2, 11))),
    "glm5_next": Case(dim=128, block_size=16, lengths=((1, 48), (40, 55), (33, 33), (1, 7))),
}


def make_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, padding: tuple[int, int] = (0, 0)
) -> Inputs:
    """Random inputs; keys and gates are parts of wider rows. What no sequence goes on from, and
    what a state holds past the tokens of its block, is NaN."""
    rng = torch.Generator().manual_seed(0)
    num_seqs, size = len(case.lengths), case.block_size
    num_new = torch.tensor([new for new, _ in case.lengths])
    seq_lens = torch.tensor([total for _, total in case.lengths])
    wide = torch.randn(int(num_new.sum()) + padding[0], 2 * case.dim + 3, generator=rng).to(dtype)
    slots = torch.randperm(num_seqs + 2, generator=rng)[:num_seqs] + 1
    before = seq_lens - num_new
    initial = slots.where(before > 0, 0)
    initial[::3] += (initial[::3] > 0) * (num_seqs + 2)  # from a slot that is not written
    state = torch.randn(2 * num_seqs + 5, size - 1, 2, case.dim, generator=rng).to(dtype)
    is_held = torch.zeros(state.shape[:2], dtype=torch.bool)
    is_held[initial] = torch.arange(size - 1) < (before % size)[:, None]
    is_held[0] = False
    none = [0] * padding[1]
    return Inputs(
        keys=wide[:, : case.dim],
        gates=wide[:, case.dim + 3 :] * 3,
        bias=torch.randn(size, case.dim, generator=rng).to(dtype),
        state=state.masked_fill(~is_held[:, :, None, None], torch.nan),
        cu_seqlens=offsets([*num_new.tolist(), *none]),
        seq_lens=torch.tensor([*seq_lens.tolist(), *none]).int(),
        initial_indices=torch.tensor([*initial.tolist(), *none]).int(),
        state_indices=torch.tensor([*slots.tolist(), *none]).int(),
    )
