"""Inputs of pooled_selection_step: decode steps of real models and odd small ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.declared import DeclaredInputs
from tests.ops.select_blocks import cases as selection
from tests.ops.select_blocks.cases import Case
from torch_hybrid.ops.pooled_selection_step.op import PooledSelectionStep


@dataclass(slots=True, kw_only=True)
class Inputs(DeclaredInputs, PooledSelectionStep):
    """The arguments of one call."""

    impl: str = ""


CASES = {
    "glm5_next": Case(
        num_heads=32,
        index_dim=128,
        block_size=16,
        top_k=8,
        # Of one tile and of two, the last block complete, alone in its tile, or not.
        lengths=((1, 300), (1, 304), (1, 1296), (1, 1040), (0, 40), (1, 1037), (1, 16), (1, 1)),
        has_weights=True,
    ),
    "odd": Case(
        num_heads=3,
        index_dim=48,
        block_size=3,
        top_k=2,
        page_size=6,
        lengths=((1, 12), (0, 0), (1, 11), (1, 37), (1, 36), (0, 5), (1, 1), (1, 240)),
    ),
    "a_token_a_block": Case(
        num_heads=1, index_dim=16, block_size=1, top_k=5, page_size=1, lengths=((1, 7), (1, 80))
    ),
    "takes_all": Case(
        num_heads=2, index_dim=32, block_size=4, top_k=40, lengths=((1, 20), (1, 7), (1, 4))
    ),
}
SMALL = Case(num_heads=2, index_dim=32, block_size=4, top_k=3, lengths=((1, 23), (1, 28), (1, 1)))


def make_inputs(
    case: Case,
    *,
    dtype: torch.dtype = torch.bfloat16,
    padding: tuple[int, int] = (0, 0),
    alike: bool = True,
) -> Inputs:
    """Random inputs; keys and gates are parts of wider rows.

    With ``alike``, the tokens of a block have the same whole numbers for keys, so that 16 bits hold
    a mean, and scores are whole too. What no sequence goes on from, what a state holds past the
    tokens of its block, and blocks that were not complete are NaN.
    """
    chosen = selection.make_inputs(case, dtype=dtype, padding=padding)
    generator = torch.Generator().manual_seed(1)
    (num_tokens, _, dim), size = chosen.q.shape, case.block_size
    num_new, seq_lens = chosen.cu_seqlens.diff(), chosen.seq_lens
    num_seqs = len(num_new)

    def keys_of(*shape: int) -> Tensor:
        if alike:
            return torch.randint(-2, 3, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    wide = torch.full((num_tokens, 2 * dim + 3), torch.nan)
    of_block = keys_of(num_seqs, 1, dim).expand(-1, size, -1)
    keys = of_block if alike else keys_of(num_seqs, size, dim)
    gates = 3 * torch.randn(num_seqs, size, dim, generator=generator)
    place = (seq_lens - 1) % size
    live = num_new.nonzero()[:, 0]
    new = chosen.cu_seqlens[:-1][live].long()
    wide[new, :dim] = keys[live, place[live].long()]
    wide[new, dim + 3 :] = gates[live, place[live].long()]
    slots = torch.randperm(num_seqs + 2, generator=generator)[:num_seqs] + 1
    slots = slots.where(seq_lens > 0, 0)  # of padding
    initial = slots.where(seq_lens > num_new, 0)
    initial[::3] += (initial[::3] > 0) * (num_seqs + 2)  # from a slot that is not written
    state = torch.full((2 * num_seqs + 5, size - 1, 2, dim), torch.nan)
    for n in live.tolist():
        if initial[n]:
            held = slice(0, int(place[n]))
            state[initial[n], held] = torch.stack([keys[n, held], gates[n, held]], 1)
    bias = torch.randn(size, dim, generator=generator)
    return Inputs(
        q=chosen.q,
        keys=wide.to(dtype)[:, :dim],
        gates=wide.to(dtype)[:, dim + 3 :],
        bias=bias.to(dtype),
        weights=chosen.weights,
        state=state.to(dtype),
        block_keys=chosen.block_keys,
        cu_seqlens=chosen.cu_seqlens,
        seq_lens=seq_lens,
        page_table=chosen.page_table,
        slot_mapping=chosen.slot_mapping,
        initial_indices=initial.int(),
        state_indices=slots.int(),
        top_k=case.top_k,
    )
