"""Causal attention within the sequences of packed rows on a GPU, by torch's FlexAttention.

Blocks of tokens that share no sequence are skipped. Which those are follows from tensors alone, so
that launches do not grow with a packing's capacity, as those by sequences do; and two backwards
have the same bits, unlike those of flash kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from torch_hybrid.ops.packed_attention.reference import named_blocks

_BLOCK = 128
_MAX_FORMS = 256


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
    picked: Tensor | None = None,
    block_size: int = 1,
) -> Tensor:
    """Attend from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K], float32, bfloat16 or float16. k [T, HKV, K] and v [T, HKV, V] in that dtype.
        cu_seqlens: [N + 1] int32 offsets from 0 to T.
        scale: factor on products.
        window: tokens that one attends to, itself among them; None for all.
        picked: [T, B] int32 blocks of sequences that a token attends to, or None.
        block_size: tokens in such a block.

    Returns:
        [T, H, V].
    """
    out = _attend(q, k, v, blocks_of(cu_seqlens, q.shape[0], window, picked, block_size), scale)
    rows: Tensor = out[0].transpose(0, 1)
    return rows


def attend_with_biases(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend likewise, and add ``bias`` [T, H, R] of queries, by the distance of a key.

    Keys at R or farther have 0. A query has one weight at a distance, so no sum of several is
    rounded in the gradient of its bias.

    Returns:
        [T, H, V], and the logarithms [T, H] float32 of sums of weights.
    """
    reach = bias.shape[-1]

    def biased(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        before = query - key
        added = bias[query, head, before.clamp(0, reach - 1)]
        return score + torch.where(before < reach, added, 0.0)

    returned = {"score_mod": biased, "return_aux": AuxRequest(lse=True)}
    out, sums = _attend(q, k, v, blocks_of(cu_seqlens, q.shape[0], window), scale, **returned)
    return out[0].transpose(0, 1), sums.lse[0].T


def _attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, scale: float, **options: Any
) -> Any:
    """Run FlexAttention on one row [1, H, T, K] of tokens."""
    is_compiled = torch.compiler.is_compiling() or not q.is_cuda
    attend: Any = flex_attention if is_compiled else _attend_compiled
    # For fewer than 128 queries, Inductor would take its kernel of decode steps, and find no size.
    options |= {"kernel_options": {"BACKEND": "TRITON"}} if q.is_cuda else {}
    return attend(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        **options,
    )


def _attend_compiled(*qkv: Tensor, **options: Any) -> Any:
    """Run FlexAttention compiled for models that are not: it would make all T x T weights.

    So it does, without an error, past Dynamo's 8 forms of a function, which all models of a process
    share: layers with a window, dtypes, and evaluations without gradients have forms of their own.
    """
    with torch._dynamo.config.patch(recompile_limit=_MAX_FORMS):
        return _compiled()(*qkv, **options)


def blocks_of(
    cu_seqlens: Tensor,
    num_tokens: int,
    window: int | None = None,
    picked: Tensor | None = None,
    block_size: int = 1,
) -> BlockMask:
    """Find the blocks of keys that each block of queries reads: whole ones and partial ones.

    Sequences lie one after the other. So a block of keys is read if its last token's sequence is
    not before that of the queries' first token. Both must be near enough for a window. Or a query
    has picked a block of its sequence that lies there, or may see tokens there that follow all
    complete ones.
    """
    window = num_tokens if window is None else window
    token = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    seq = torch.searchsorted(cu_seqlens, token, right=True, out_int32=True)
    num_blocks = -(-num_tokens // _BLOCK)
    block = torch.arange(num_blocks, dtype=torch.int64, device=cu_seqlens.device)
    first, last = seq[::_BLOCK], seq[((block + 1) * _BLOCK - 1).clamp(max=num_tokens - 1)]
    before = (block[:, None] - block) * _BLOCK  # tokens from a block's first key to the queries'
    is_read = (last >= first[:, None]) & (before >= 0) & (before - _BLOCK + 1 < window)
    is_whole = (first == last[:, None]) & (before > 0) & (before + _BLOCK - 1 < window)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (seq[query] == seq[key]) & (query >= key) & (query - key < window)

    rule: Callable[..., Tensor] = sees
    if picked is not None:
        position = token - cu_seqlens[seq - 1]
        of, done = position // block_size, (position + 1) // block_size
        named = named_blocks(picked, num_tokens, block_size)
        padding = num_blocks * _BLOCK - num_tokens
        by_block = pad(named, (0, 0, 0, padding)).unflatten(0, (-1, _BLOCK)).any(1)
        by_block = pad(by_block[:, of], (0, padding)).unflatten(1, (-1, _BLOCK)).any(2)
        is_read &= by_block | (before - _BLOCK + 1 < block_size)
        is_whole = torch.zeros_like(is_whole)

        def sees_picked(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            is_seen = named[query, of[key]] | (of[key] >= done[query])
            return sees(batch, head, query, key) & is_seen

        rule = sees_picked
    return BlockMask.from_kv_blocks(
        *_listed(is_read & ~is_whole),
        *_listed(is_whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=rule,
        seq_lengths=(num_tokens, num_tokens),
    )


def _listed(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Count the wanted blocks [1, 1, Q] of each row, and list their numbers [1, 1, Q, K] first."""
    numbers = torch.argsort(wanted.to(torch.int8), dim=-1, descending=True, stable=True)
    return wanted.sum(-1, dtype=torch.int32)[None, None], numbers.int()[None, None]


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)
