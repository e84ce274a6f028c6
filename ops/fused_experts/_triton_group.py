"""Pairs of a token and its expert, sorted by expert on the device, and cut into blocks.

Every grid follows from shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import early

_CHUNK = 128  # pairs that a program brings into order


def num_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Bound the blocks of pairs of one expert, for any choices: each chosen expert may leave one
    unfilled."""
    most_hit = min(num_pairs, num_experts)
    return (num_pairs - most_hit) // block + most_hit


def group_pairs(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs by expert: return their numbers in that order, and each expert's first place.

    The sort counts, in chunks of pairs: up to three launches.
    """
    num_pairs = expert_ids.numel()
    order = expert_ids.new_empty(num_pairs, dtype=torch.int32)
    starts = expert_ids.new_empty(num_experts + 1, dtype=torch.int32)
    chunk = max(16, min(_CHUNK, triton.next_power_of_2(num_pairs)))
    num_chunks = triton.cdiv(num_pairs, chunk)
    counts = expert_ids.new_empty(num_chunks + 1, num_experts, dtype=torch.int32)
    sizes = {"E": num_experts, "BLOCK_E": max(16, triton.next_power_of_2(num_experts)), "C": chunk}
    follows = early(expert_ids.device)
    if num_chunks > 1:
        _count_kernel[(num_chunks,)](expert_ids, counts, num_pairs, **sizes, num_warps=4, **follows)
        _add_up_kernel[(triton.cdiv(num_experts, 4),)](
            counts, num_chunks, E=num_experts, BLOCK_E=4, BLOCK=256, num_warps=4, **follows
        )
    _place_kernel[(num_chunks,)](
        expert_ids,
        counts,
        order,
        starts,
        num_pairs,
        num_chunks,
        **sizes,
        ONE_CHUNK=num_chunks == 1,
        num_warps=8,
        **follows,
    )
    return order, starts


def cut_blocks(starts: Tensor, num_pairs: int, block: int) -> Tensor:
    """Cut the sorted pairs into blocks of one expert: ``[B, 4]`` int32, for the most that there may
    be.

    A row holds the block's expert (E past the last block), its first place, how many pairs it has,
    and 0.
    """
    num_experts = starts.shape[0] - 1
    blocks = starts.new_empty(num_blocks(num_pairs, num_experts, block), 4)
    size = triton.next_power_of_2(num_experts)
    _cut_kernel[(blocks.shape[0],)](
        starts, blocks, E=num_experts, BLOCK_E=size, M=block, num_warps=4
    )
    return blocks


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    expert_ids: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    C: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Count the pairs of each expert in a chunk of C pairs. Grid: chunks."""
    follow(EARLY)
    pair = tl.program_id(0) * C + tl.arange(0, C)
    chosen = tl.load(expert_ids + pair, mask=pair < num_pairs, other=E).to(tl.int32)
    expert = tl.arange(0, BLOCK_E)
    count = tl.histogram(chosen, BLOCK_E, mask=chosen < E)
    tl.store(counts + tl.program_id(0) * E + expert, count, mask=expert < E)


@triton.jit(do_not_specialize=["num_chunks"])
def _add_up_kernel(
    counts: tl.tensor,
    num_chunks: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Replace BLOCK_E experts' counts of each chunk by the sums over all chunks before it.

    Grid: experts / BLOCK_E. Tile: BLOCK chunks. The row past the last chunk receives the totals.
    """
    follow(EARLY)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], dtype=tl.int32)
    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        mask = (chunk < num_chunks)[:, None] & (expert < E)[None, :]
        p_count = counts + chunk[:, None] * E + expert[None, :]
        count = tl.load(p_count, mask=mask, other=0)
        tl.store(p_count, before[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        before += tl.sum(count, 0)
    tl.store(counts + num_chunks * E + expert, before, mask=expert < E)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _place_kernel(
    expert_ids: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    num_pairs: tl.tensor,
    num_chunks: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    C: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Store the pairs of a chunk of C at their places in the order of experts.

    Grid: chunks; the first also stores where each expert begins. Registers: C by C comparisons.
    """
    follow(EARLY)
    own = tl.program_id(0)
    nth = tl.arange(0, C)
    pair = own * C + nth
    chosen = tl.load(expert_ids + pair, mask=pair < num_pairs, other=E).to(tl.int32)
    expert = tl.arange(0, BLOCK_E)
    if ONE_CHUNK:
        count = tl.histogram(chosen, BLOCK_E, mask=chosen < E)
        first = tl.cumsum(count, 0) - count
        start = first
    else:
        count = tl.load(counts + num_chunks * E + expert, mask=expert < E, other=0)
        start = tl.cumsum(count, 0) - count
        first = start + tl.load(counts + own * E + expert, mask=expert < E, other=0)
    if own == 0:
        tl.store(starts + expert, start, mask=expert < E)
        tl.store(starts + E, tl.sum(count, 0))
    is_before = (chosen[None, :] == chosen[:, None]) & (nth[None, :] < nth[:, None])
    place = tl.gather(first, tl.minimum(chosen, E - 1), 0) + tl.sum(is_before.to(tl.int32), 1)
    tl.store(order + place, pair, mask=chosen < E)


@triton.jit
def _cut_kernel(
    starts: tl.tensor,
    blocks: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    M: tl.constexpr,
) -> None:
    """Describe one block of M places in a row of ``blocks``. Grid: blocks."""
    block = tl.program_id(0)
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, M)
    tl.store(blocks + 4 * block, expert)
    tl.store(blocks + 4 * block + 1, begin)
    tl.store(blocks + 4 * block + 2, tl.minimum(end - begin, M))
    tl.store(blocks + 4 * block + 3, 0)


@triton.jit
def rows_of_block(
    starts: tl.tensor, block: tl.tensor, E: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Find a block's expert (E when it is idle), its first place, and its expert's end."""
    index = tl.arange(0, BLOCK_E)
    begin = tl.load(starts + index, mask=index < E, other=0)
    end = tl.load(starts + index + 1, mask=index < E, other=0)
    count = (end - begin + M - 1) // M
    is_before = (tl.cumsum(count, 0) <= block) & (index < E)
    expert = tl.sum(is_before.to(tl.int32), 0)
    first = block - tl.sum(tl.where(is_before, count, 0), 0)
    is_own = index == expert
    begin = tl.sum(tl.where(is_own, begin, 0), 0) + first * M
    return expert, begin, tl.sum(tl.where(is_own, end, 0), 0)
