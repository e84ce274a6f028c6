"""Implementation "flashinfer": FlashInfer's fa3 kernel for decode over latents, for Hopper.

One program on each processor (or pair of them) takes pieces of sequences. The host has dealt them
out so that all have as many latents to read. Those of a sequence that was cut are merged at the end
of the same launch. The schedule is FlashInfer's own. It leaves room for 16384 pieces: what a
step of so many sequences can have is packed closer, since it is copied at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths, Planned
from torch_hybrid.ops.flashinfer.scratch import Scratch, first_pages
from torch_hybrid.ops.latent_attention._triton_store import store_rows
from torch_hybrid.ops.latent_attention.op import LatentAttention
from torch_hybrid.ops.triton.padding import set_padding

_NOT_CAUSAL = 0  # of one query a sequence, which sees all keys
_ROWS = 64  # heads that a program takes at once
_MOST_PROCESSORS = 160  # of the GPUs there are


@dataclass(frozen=True, slots=True)
class _Parts:
    """Places of a plan's values that are offsets of parts of the schedule.

    Parts are named by what they have entries for. The other values are two sizes of the grid, and
    two offsets in the workspace.
    """

    grid: tuple[int, ...] = (0, 1)
    piece: tuple[int, ...] = (2, 3, 4, 10, 11, 12, 13, 14)
    processor: tuple[int, ...] = (5, 6, 7, 8, 9)
    first_piece: int = 15
    partial_out: int = 16
    partial_lse: int = 17


_PARTS = _Parts()


def plan(
    lengths: Lengths,
    *,
    num_heads: int,
    rank: int,
    rope_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    **_: int,
) -> Planned:
    """Plan FlashInfer's schedule for a step of one token a sequence, and where its parts begin."""
    scratch = Scratch.of(device)
    workspace = scratch.workspace(2 * _ROWS * _MOST_PROCESSORS * (2 * rank + 4) + 64)
    with scratch.lock:
        # What FlashInfer wraps around it allocates pinned memory at every plan, for 15 ms.
        offsets, _ = _module(dtype, rank, rope_dim)._module.plan(
            workspace,
            scratch.ints,
            scratch.pinned,
            lengths.cu_seqlens,
            first_pages(lengths.page_table),
            lengths.seq_lens,
            num_heads,
            rank,
            False,  # causal
        )
        offsets = [int(offset) for offset in offsets]
        return packed(scratch.pinned, offsets, lengths.seq_lens.shape[0], num_heads)


def packed(pinned: Tensor, offsets: Sequence[int], num_seqs: int, num_heads: int) -> Planned:
    """Pack a schedule into as much as any step of these sequences needs.

    No sequence is cut unless the pieces are as long as a program's share of all latents: there are
    at most as many cuts as programs.
    """
    num_programs = offsets[0] * offsets[1]
    num_pieces = num_seqs * -(-num_heads // _ROWS) + num_programs
    counts = dict.fromkeys(_PARTS.piece, num_pieces)
    counts |= dict.fromkeys(_PARTS.processor, num_programs)
    counts[_PARTS.first_piece] = num_programs + 1
    ints, values, parts, end = pinned.view(torch.int32), list(offsets), [], 0
    first_pieces = ints[offsets[_PARTS.first_piece] // 4 :]
    assert int(first_pieces[offsets[1]]) <= num_pieces
    for place, count in counts.items():
        rounded = -(-count // 4) * 4  # parts begin at multiples of 16 bytes
        begin = offsets[place] // 4
        parts.append(ints[begin : begin + rounded])
        values[place] = 4 * end
        end += rounded
    return Planned(tensors=(torch.cat(parts),), values=tuple(values))


def latent_attention(x: LatentAttention) -> Tensor:
    """Launch ``torch_hybrid::latent_attention``."""
    (schedule, values), q_latent, pool = x.planned or (), x.q_latent, x.pool
    _, num_heads, rank = q_latent.shape
    offsets = values.tolist()
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    lse = q_latent.new_empty(out.shape[:2], dtype=torch.float32)
    store_rows(x, pool)
    set_padding(out, lse, x.cu_seqlens)
    num_rows = 2 * offsets[0] * offsets[1] * _ROWS  # of partial results, of all programs
    workspace = out.new_empty(offsets[_PARTS.partial_lse] + 4 * num_rows, dtype=torch.uint8)
    _module(q_latent.dtype, rank, x.q_rope.shape[2]).run(
        workspace,
        schedule,
        offsets,
        q_latent,
        x.q_rope,
        pool[..., :rank],
        pool[..., rank:],
        x.page_table.flatten(),
        out,
        lse,
        _NOT_CAUSAL,
        num_heads,
        pool.shape[1],
        x.scale,
        True,  # the log-sum-exp is a natural logarithm
        1.0,  # latents are as they are stored,
        1.0,  # and so are keys
        None,
    )
    return out


@cache
def _module(dtype: torch.dtype, rank: int, rope_dim: int) -> Any:
    """Load FlashInfer's compiled kernel, which is built when it is first wanted."""
    from flashinfer.mla._batch_mla._backends.fa3_backend import get_batch_mla_module

    return get_batch_mla_module("fa3", dtype, dtype, dtype, torch.int32, rank, rope_dim, False)
