"""Inputs of block_attention: those of paged_attention, with blocks drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.declared import PagedInputs
from tests.ops.paged_attention import cases as pages
from torch_hybrid.ops.block_attention.op import BlockAttention


@dataclass(frozen=True, kw_only=True)
class Case:
    """Heads and lengths, blocks, and how many of them a query sees; whether keys have values beside
    them, or are latents."""

    pages: pages.Case
    block_size: int
    top_k: int
    has_values: bool = True


@dataclass(slots=True, kw_only=True)
class Inputs(PagedInputs, BlockAttention):
    """The arguments of one call."""

    impl: str = ""


CASES = {
    "qwen4_exp": Case(
        pages=pages.Case(
            num_q_heads=24,
            num_kv_heads=2,
            head_dim=256,
            lengths=((1, 900), (7, 700), (19, 19), (1, 1)),
        ),
        block_size=4,
        top_k=160,
    ),
    "more_heads_than_rows": Case(
        pages=pages.Case(
            num_q_heads=20, num_kv_heads=1, head_dim=64, lengths=((1, 2100), (5, 61), (1, 16))
        ),
        block_size=16,
        top_k=60,
    ),
    "odd": Case(
        pages=pages.Case(
            num_q_heads=3,
            num_kv_heads=1,
            head_dim=80,
            page_size=6,
            lengths=((0, 0), (13, 37), (1, 11), (2, 2), (1, 12)),
        ),
        block_size=3,
        top_k=2,
    ),
    "a_token_a_block": Case(
        pages=pages.Case(
            num_q_heads=2, num_kv_heads=2, head_dim=16, page_size=1, lengths=((7, 7), (1, 30))
        ),
        block_size=1,
        top_k=5,
    ),
    "glm5_next": Case(
        pages=pages.Case(
            num_q_heads=40, num_kv_heads=1, head_dim=512, lengths=((1, 650), (2, 290), (5, 5))
        ),
        block_size=16,
        top_k=16,
        has_values=False,
    ),
    "odd_latents": Case(
        pages=pages.Case(
            num_q_heads=19,
            num_kv_heads=1,
            head_dim=48,
            page_size=6,
            lengths=((13, 37), (0, 0), (1, 11), (2, 2)),
        ),
        block_size=3,
        top_k=2,
        has_values=False,
    ),
    "qwen4_exp_extend": Case(
        pages=pages.Case(
            num_q_heads=24, num_kv_heads=2, head_dim=256, lengths=((130, 130), (9, 200), (1, 40))
        ),
        block_size=4,
        top_k=14,
    ),
    "long_extend": Case(pages=pages.CASES["long_extend"], block_size=2, top_k=20),
}
SMALL = Case(
    pages=pages.Case(
        num_q_heads=4, num_kv_heads=2, head_dim=32, lengths=((1, 23), (9, 30), (1, 1))
    ),
    block_size=4,
    top_k=3,
)


def make_inputs(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    padding: tuple[int, int] = (0, 0),
    unused: float = torch.nan,
) -> Inputs:
    """Random inputs; of the queries that could see more than ``top_k`` blocks, every third sees
    fewer."""
    inputs = pages.make_inputs(case.pages, dtype=dtype, padding=padding, unused=unused)
    generator = torch.Generator().manual_seed(1)
    blocks = torch.full((len(inputs.q), case.top_k), -1, dtype=torch.int32)
    for n, length in enumerate(inputs.seq_lens.tolist()):
        for t in range(inputs.cu_seqlens[n], inputs.cu_seqlens[n + 1]):
            complete = (length - int(inputs.cu_seqlens[n + 1]) + t + 1) // case.block_size
            count = min(complete, case.top_k)
            if complete > case.top_k and t % 3 == 2:
                count = max(1, count // 2)
            drawn = torch.randperm(complete, generator=generator)[:count].sort().values
            blocks[t, :count] = drawn.int()
    k, v, kv = inputs.k, inputs.v, inputs.kv
    return Inputs(
        q=inputs.q,
        k=k if case.has_values else k[:, 0],
        v=v if case.has_values else None,
        kv=kv if case.has_values else kv[0, :, :, 0].contiguous(),
        blocks=blocks,
        cu_seqlens=inputs.cu_seqlens,
        seq_lens=inputs.seq_lens,
        page_table=inputs.page_table,
        slot_mapping=inputs.slot_mapping,
        block_size=case.block_size,
        scale=case.pages.head_dim**-0.5,
    )
