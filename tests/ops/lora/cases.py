"""Adapters of rows: inputs for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from torch_hybrid.ops.lora.op import Lora


@dataclass(frozen=True, kw_only=True)
class Case:
    slots: tuple[int, ...]  # of each row, from 1; 0: no adapter
    depth: int
    widths: tuple[int, ...]  # of the parts
    ranks: tuple[tuple[int, ...], ...]  # of each adapter, in each part
    rank: int  # of the pools


CASES = {
    "decode": Case(slots=(1, 2, 0, 1, 3), depth=64, widths=(96,), ranks=((4,), (8,), (5,)), rank=8),
    "parts": Case(
        slots=(2, 2, 0, 3, 1),
        depth=77,
        widths=(131, 9, 70),
        ranks=((3, 0, 5), (0, 0, 0), (7, 7, 1)),
        rank=7,
    ),
    "one_row": Case(slots=(1,), depth=20, widths=(37,), ranks=((1,),), rank=1),
    "large_rank": Case(slots=(1, 1), depth=130, widths=(600,), ranks=((256,),), rank=256),
    "prompt": Case(
        slots=(0,) * 20 + (2,) * 90 + (1,) * 31, depth=48, widths=(528, 24), ranks=((4, 2), (0, 3)),
        rank=4,
    ),
    "nobody": Case(slots=(0, 0, 0), depth=16, widths=(40,), ranks=((2,),), rank=3),
    "no_rows": Case(slots=(), depth=16, widths=(40,), ranks=((2,),), rank=2),
}  # fmt: skip


def tensors(call: Lora) -> list[Tensor]:
    """The op's arguments in their order."""
    return [getattr(call, each.name) for each in fields(call) if each.name != "impl"]


def make_inputs(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Lora:
    """Rows that lie apart, and NaN in what the op does not read."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, width = len(case.slots), sum(case.widths)
    num_slots, num_parts = len(case.ranks), len(case.widths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    a = draw(num_slots, num_parts, case.rank, case.depth) * case.depth**-0.5
    b = draw(num_slots, case.rank, width) * case.rank**-0.5
    starts = torch.tensor([0, *case.widths]).cumsum(0).to(torch.int32)
    for slot, ranks in enumerate(case.ranks):
        for part, rank in enumerate(ranks):
            a[slot, part, rank:] = torch.nan
            b[slot, rank:, starts[part] : starts[part + 1]] = torch.nan
    wide = draw(num_tokens, width + case.depth + 5).to(dtype)
    return Lora(
        wide[:, 2 : 2 + width],
        wide[:, 3 + width : 3 + width + case.depth],
        a.to(dtype),
        b.to(dtype),
        torch.tensor(case.ranks, dtype=torch.int32).view(num_slots, num_parts),
        starts,
        torch.tensor(case.slots, dtype=torch.int32),
        impl="",
    )
