"""Inputs of select_blocks: shapes of real models and odd small ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.declared import PagedInputs
from tests.ops.pages import lay_out
from torch_hybrid.ops.select_blocks.op import SelectBlocks


@dataclass(frozen=True, kw_only=True)
class Case:
    """Index heads, blocks, and for each sequence its (new tokens, total length)."""

    num_heads: int
    index_dim: int
    block_size: int
    top_k: int
    lengths: tuple[tuple[int, int], ...]
    page_size: int = 16
    has_weights: bool = False


@dataclass(slots=True, kw_only=True)
class Inputs(PagedInputs, SelectBlocks):
    """The arguments of one call."""

    impl: str = ""


CASES = {
    "qwen4_exp": Case(
        num_heads=4,
        index_dim=128,
        block_size=4,
        top_k=512,
        lengths=((1, 2600), (3, 2090), (1, 3), (9, 9)),
    ),
    "glm5_next": Case(
        num_heads=32,
        index_dim=128,
        block_size=16,
        top_k=8,
        lengths=((1, 300), (40, 170)),
        has_weights=True,
    ),
    "odd": Case(
        num_heads=3,
        index_dim=48,
        block_size=3,
        top_k=2,
        page_size=6,
        lengths=((0, 0), (13, 37), (1, 11), (2, 2), (1, 12), (0, 5)),
        has_weights=True,
    ),
    "a_token_a_block": Case(
        num_heads=1, index_dim=16, block_size=1, top_k=5, page_size=1, lengths=((7, 7), (1, 30))
    ),
    "many_blocks": Case(
        num_heads=1, index_dim=16, block_size=1, top_k=70, lengths=((1, 4500), (1, 60))
    ),
    "long_extend": Case(num_heads=2, index_dim=64, block_size=2, top_k=9, lengths=((150, 290),)),
}
SMALL = Case(num_heads=2, index_dim=32, block_size=4, top_k=3, lengths=((1, 23), (9, 30), (1, 1)))


def make_inputs(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    unused: float = math.nan,
    padding: tuple[int, int] = (0, 0),
) -> Inputs:
    """Random inputs with shuffled pages, whose scores are whole numbers: no rounding, many ties.

    Keys of tokens that are no block's last are NaN, and so is what the pool holds of no block that
    was complete.
    """
    generator = torch.Generator().manual_seed(0)
    layout = lay_out(case.lengths, case.page_size, generator, padding)
    num_tokens, size = len(layout.slot_mapping), case.block_size

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    pool = torch.full((layout.num_pages * case.page_size // size, case.index_dim), unused)
    kept = layout.prefix_slots[layout.prefix_slots % size == size - 1] // size
    pool = pool.to(dtype)
    pool[kept] = whole(len(kept), case.index_dim)
    keys = whole(num_tokens, case.index_dim)
    keys[layout.slot_mapping % size != size - 1] = math.nan
    weights = whole(num_tokens, case.num_heads).to(torch.promote_types(dtype, torch.float32))
    return Inputs(
        q=whole(num_tokens, case.num_heads, case.index_dim),
        keys=keys,
        weights=weights if case.has_weights else None,
        block_keys=pool.view(layout.num_pages, -1, case.index_dim),
        cu_seqlens=layout.cu_seqlens,
        seq_lens=layout.seq_lens,
        page_table=layout.page_table,
        slot_mapping=layout.slot_mapping,
        block_size=size,
        top_k=case.top_k,
    )
