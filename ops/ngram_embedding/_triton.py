"""Implementation "triton": a program for each token, then one for each sequence's history."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.ngram_embedding.op import NgramEmbedding
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import sequence_of_token


def ngram_embedding(x: NgramEmbedding) -> Tensor:
    """Launch ``torch_hybrid::ngram_embedding``."""
    num_tokens, num_seqs = x.tokens.shape[0], x.state_indices.shape[0]
    num_heads, num_back, dim = x.head_sizes.shape[0], x.history.shape[1], x.table.shape[1]
    out = x.empty()
    if num_tokens == 0 or num_seqs == 0:
        return out.zero_()
    bind(_look_up_kernel, x)[(num_tokens,)](
        out=out,
        BACK=num_back,
        HEADS=num_heads,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
    )
    bind(_history_kernel, x)[(num_seqs,)](
        BACK=num_back, BLOCK=triton.next_power_of_2(num_back), num_warps=1
    )
    return out


@triton.jit(do_not_specialize=["num_seqs", "eos"])
def _look_up_kernel(
    tokens: tl.tensor,
    table: tl.tensor,
    multipliers: tl.tensor,
    head_sizes: tl.tensor,
    head_offsets: tl.tensor,
    history: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    out: tl.tensor,
    num_seqs: tl.tensor,
    eos: tl.tensor,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Look up the rows of all heads of one token in a program."""
    token = tl.program_id(0)
    head = tl.arange(0, BLOCK_H)
    index = tl.arange(0, BLOCK_D)[None, :]
    is_head = head < HEADS
    mask = is_head[:, None] & (index < D)
    p_out = out + (token.to(tl.int64) * HEADS + head)[:, None] * D + index
    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    if seq >= num_seqs:
        tl.store(p_out, tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty), mask=mask)
        return
    begin = tl.load(cu_seqlens + seq)
    initial = tl.load(initial_indices + seq).to(tl.int64)
    hashed = tl.zeros([BLOCK_H], tl.int64) + tl.load(tokens + token) * tl.load(multipliers)
    ended = token < 0
    for back in tl.static_range(1, BACK + 1):
        source = token - back
        is_new = source >= begin
        is_old = (source < begin) & (initial != 0)
        before = tl.load(tokens + source, mask=is_new, other=0)
        p_old = history + initial * BACK + (source - begin + BACK)
        before += tl.load(p_old, mask=is_old, other=0)
        ended = ended | (before == eos) | ((source < begin) & (initial == 0))
        counts = head >= (back - 1) * (HEADS // BACK)
        mixed = tl.where(ended, eos, before) * tl.load(multipliers + back)
        hashed = tl.where(counts, hashed ^ mixed, hashed)
    size = tl.load(head_sizes + head, mask=is_head, other=1)
    rest = hashed % size
    row = tl.load(head_offsets + head, mask=is_head, other=0) + tl.where(
        rest < 0, rest + size, rest
    )
    tl.store(p_out, tl.load(table + row[:, None] * D + index, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["eos"])
def _history_kernel(
    tokens: tl.tensor,
    history: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    eos: tl.tensor,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the last tokens of one sequence in a program."""
    seq = tl.program_id(0)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    slot = tl.load(state_indices + seq).to(tl.int64)
    if (slot == 0) | (begin == end):
        return
    initial = tl.load(initial_indices + seq).to(tl.int64)
    index = tl.arange(0, BLOCK)
    is_entry = index < BACK
    source = end - BACK + index
    b_new = tl.load(tokens + source, mask=is_entry & (source >= begin), other=0)
    is_old = is_entry & (source < begin)
    p_old = history + initial * BACK + (source - begin + BACK)
    b_old = tl.load(p_old, mask=is_old & (initial != 0), other=0)
    b_old = tl.where(initial == 0, eos, b_old)
    tl.debug_barrier()  # all of the old tokens have been read, by whichever thread
    tl.store(history + slot * BACK + index, tl.where(is_old, b_old, b_new), mask=is_entry)
