"""Choice of the blocks of tokens to attend to, within packed sequences.

No gradient reaches what chooses, as in transformers: a choice has none.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.core.registration import first_impl
from torch_hybrid.ops.gated_pooling import gated_pooling
from torch_hybrid.ops.select_blocks import select_blocks
from torch_hybrid.packing import Packing

_BLOCKS = 64  # of a page


def pick_blocks(
    q: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    packing: Packing,
    *,
    block_size: int,
    top_k: int,
) -> Tensor:
    """Pick the complete blocks of highest score, ``sum_h weights[h] * relu(q[h] . key)``.

    A sequence is cut into blocks, its first token begins one. The choice is a server's, made by the
    same op: the pages that it wants are laid out here, as many for each sequence as it fills.

    Args:
        q: [T, H, D] index queries, in any float dtype.
        keys: [T, D] likewise: the key of the block that a token is the last of. Those of other
            tokens are not read.
        weights: [T, H] likewise; None: all are 1.
        packing: of the T tokens.
        block_size: tokens in a block.
        top_k: most blocks that a token picks.

    Returns:
        [T, top_k] int32 numbers of blocks in their sequences, rising; -1 after them.
    """
    dtype = torch.promote_types(q.dtype, keys.dtype)
    q, keys = q.to(dtype), keys.to(dtype)
    if weights is not None:
        weights = weights.to(torch.promote_types(dtype, torch.float32))
    num_tokens, page_size = packing.num_tokens, _BLOCKS * block_size
    num_pages = num_tokens // block_size + 2  # a block fills one at most; 0 is nobody's
    lengths = packing.cu_seqlens.diff()
    filled = (lengths // block_size + _BLOCKS - 1) // _BLOCKS
    first = 1 + filled.cumsum(0, dtype=torch.int32) - filled
    page = torch.arange(-(-num_tokens // page_size), dtype=torch.int32, device=q.device)
    return select_blocks(
        *(q, keys, weights, q.new_empty(num_pages, _BLOCKS, q.shape[-1])),
        *(packing.cu_seqlens, lengths, (first[:, None] + page).clamp(max=num_pages - 1)),
        (first[packing.sequences] * page_size + packing.positions).int(),
        block_size=block_size,
        top_k=top_k,
        impl=first_impl("select_blocks", q.device, q.dtype, index_dim=q.shape[-1]),
    )


def pool_blocks(keys: Tensor, gates: Tensor, bias: Tensor, packing: Packing) -> Tensor:
    """Compute the keys of blocks: means of their tokens' keys, weighted by a softmax of gates.

    Args:
        keys: [T, D], float dtype.
        gates: [T, D], in any float dtype.
        bias: [block_size, D] what gates have more by their place in a block, likewise.
        packing: of the T tokens.

    Returns:
        [T, D] in keys' dtype: the key of the block that a token is the last of; of others, 0.
    """
    gates, bias = gates.to(keys.dtype), bias.to(keys.dtype)
    block_size, dim = bias.shape
    nobody = torch.zeros_like(packing.cu_seqlens[1:])
    return gated_pooling(
        *(keys, gates, bias, keys.new_zeros(1, block_size - 1, 2, dim)),
        *(packing.cu_seqlens, packing.cu_seqlens.diff(), nobody, nobody),
        impl=first_impl("gated_pooling", keys.device, keys.dtype, block_size=block_size),
    )


def over_block(x: Tensor, block_size: int) -> Tensor:
    """View x [T, D] as [T, D, block_size]: each token after those before it in its block.

    The view is meaningful at the last tokens of blocks; other windows reach out of their blocks.
    """
    return pad(x, (0, 0, block_size - 1, 0)).unfold(0, block_size, 1)
