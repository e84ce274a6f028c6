"""Sizes that implementation "triton" cuts the work in."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from torch_hybrid.ops.latent_attention.op import LatentAttention
from torch_hybrid.ops.triton.devices import PROCESSORS, is_hopper

_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes that the work is cut in, from shapes alone: a captured graph serves any lengths.

    ``block_m`` rows are ``block_q`` tokens times ``block_h`` heads. Latents are taken in parts of
    ``block_part`` of ``block_rank`` elements: the narrower, the fewer rows a thread has to place.
    """

    block_q: int
    block_h: int
    block_kv: int
    block_rank: int
    block_part: int
    block_rope: int
    num_splits: int
    num_warps: int

    @property
    def block_m(self) -> int:
        return self.block_q * self.block_h

    @classmethod
    def of(cls, x: LatentAttention, *, for_hopper: bool, is_invariant: bool) -> Tiles:
        """Choose tiles for sequences of at most as many keys as a row of ``page_table`` has.

        Args:
            x: arguments of the op. FP8 latents are widened in registers, which leaves some
                for 32 rows.
            for_hopper: whether blocks of 64 rows have a form of their own. It is faster for 32
                heads too, which fill half of it.
            is_invariant: whether a token's tiles are those of as many tokens as a program takes,
                whose keys are not split. Tiles that hide all of their keys from a row leave it as
                it is.
        """
        num_tokens, num_heads, rank = x.q_latent.shape
        num_seqs, max_pages = x.page_table.shape
        max_keys, in_pairs = max_pages * x.pool.shape[1], x.pool_scale is not None
        # float32 products run outside the tensor cores, on operands held in registers.
        tensor_cores, hopper = x.q_latent.itemsize == 2, is_hopper(x.q_latent.device)
        most_rows = 16 if not tensor_cores else 64 if hopper and not in_pairs else 32
        block_h = min(triton.next_power_of_2(num_heads), most_rows)
        tokens_per_seq = triton.next_power_of_2(triton.cdiv(num_tokens, num_seqs))
        if is_invariant:
            tokens_per_seq = most_rows
        least_rows = most_rows if for_hopper and block_h == 32 else 16
        block_q = max(min(tokens_per_seq, most_rows // block_h), triton.cdiv(least_rows, block_h))
        # On Hopper two programs of up to 32 rows share a processor, and each has 64 latents of its
        # own in shared memory: one computes while the other waits. 64 rows fill it with one.
        shares = tensor_cores and hopper and block_q * block_h <= 32
        few_warps = shares or (tensor_cores and block_q * block_h <= 16)
        block_kv = 16 if not tensor_cores else 64 if hopper and not in_pairs else 32
        busy_programs = max(num_seqs, num_tokens // block_q) * triton.cdiv(num_heads, block_h)
        most_splits = 1 if is_invariant else _MAX_SPLITS
        wanted_splits = min(most_splits, PROCESSORS * (1 + shares) // max(1, busy_programs))
        num_splits = max(1, min(wanted_splits, triton.cdiv(max_keys, block_kv)))
        block_rank = max(32, triton.next_power_of_2(rank))
        return cls(
            block_q=block_q,
            block_h=block_h,
            block_kv=block_kv,
            block_rank=block_rank,
            block_part=min(block_rank, 64 if shares else 128),
            block_rope=max(16, triton.next_power_of_2(x.q_rope.shape[2])),
            num_splits=1 << (num_splits.bit_length() - 1),
            num_warps=4 if few_warps else 8,
        )
