"""Tiles of short queries: the cut of their work into programs."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from torch_hybrid.ops.paged_attention.op import Pages
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.ragged import num_blocks

# Two programs for each processor of the GPUs this is meant for (108 to 148 processors).
_TARGET_PROGRAMS = 256
_MAX_SPLITS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Cut of the work. Decided by shapes alone, so that a captured graph serves any lengths.

    A program owns ``block_q`` consecutive tokens of one sequence and one key head; its
    ``block_m`` rows are those tokens times the query heads that share the key head.
    """

    block_q: int
    block_m: int
    block_row: int  # numbers that are fetched of a row of keys, or pairs of numbers
    block_kv: int
    num_blocks: int
    num_splits: int
    num_warps: int
    are_aligned: bool  # tiles of keys begin at multiples of block_kv, also in a window

    @classmethod
    def of(cls, x: Pages, *, is_invariant: bool) -> Tiles:
        """Choose tiles for the tokens of a call.

        Of FP8 keys and values twice as many fit; four warps hold those of wide heads on
        Hopper alone.

        Args:
            x: arguments of the op.
            is_invariant: whether tiles are those for as many tokens as a program takes, whose keys
                are not split.
        """
        num_tokens, num_q_heads, head_dim = x.q.shape
        (num_seqs, max_pages), num_kv_heads = x.page_table.shape, x.kv.shape[3]
        group, in_pairs = num_q_heads // num_kv_heads, x.kv_scales is not None
        hopper = is_hopper(x.kv.device)
        # float32 products run outside the tensor cores, on operands held in registers: larger
        # tiles spill.
        tensor_cores = x.q.itemsize == 2
        block_d = max(16, triton.next_power_of_2(head_dim))
        most_rows = 64 if tensor_cores else 16
        tokens_per_seq = triton.cdiv(num_tokens, max(1, num_seqs))
        wanted_rows = triton.next_power_of_2(tokens_per_seq * group)
        if is_invariant:
            wanted_rows = most_rows
        block_m = max(16, min(wanted_rows, most_rows), triton.next_power_of_2(group))
        block_q = block_m // group
        few_rows = tensor_cores and block_m < 64
        wide = few_rows and in_pairs
        block_kv = 128 if wide else 64 if few_rows else 32 if tensor_cores else 16
        busy_programs = max(num_seqs, num_tokens // block_q) * num_kv_heads
        most_splits = 1 if is_invariant else _MAX_SPLITS
        wanted_splits = min(most_splits, _TARGET_PROGRAMS // max(1, busy_programs))
        useful_splits = triton.cdiv(max_pages * x.kv.shape[2], block_kv)
        num_splits = max(1, min(wanted_splits, useful_splits))
        return cls(
            block_q=block_q,
            block_m=block_m,
            block_row=max(16, block_d // 2) if in_pairs else block_d,
            block_kv=block_kv,
            num_blocks=num_blocks(num_tokens, num_seqs, block_q),
            num_splits=1 << (num_splits.bit_length() - 1),
            are_aligned=is_invariant,
            num_warps=8 if block_m > most_rows or (wide and not (hopper and block_d > 128)) else 4,
        )
