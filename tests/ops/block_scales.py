"""Weights in 8 bits with a scale for each block, as checkpoints hold them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.formats.block_scales import BLOCK, DTYPE, num_blocks


def in_blocks(weight: Tensor, *, num_parts: int = 1) -> tuple[Tensor, Tensor]:
    """[..., N, K] float8_e4m3fn, and the scales with which a block's largest number is 448.

    Rows are in ``num_parts`` parts that have blocks each for itself.
    """
    parts = weight.float().unflatten(-2, (num_parts, -1))
    *_, num_rows, depth = parts.shape
    high, wide = num_blocks(num_rows), num_blocks(depth)
    padded = F.pad(parts, (0, wide * BLOCK - depth, 0, high * BLOCK - num_rows))
    blocks = padded.unflatten(-1, (wide, BLOCK)).unflatten(-3, (high, BLOCK))
    largest = blocks.abs().amax((-3, -1)) if blocks.numel() else blocks.sum((-3, -1))
    scales = largest.clamp(min=1e-6) / torch.finfo(DTYPE).max
    numbers = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    numbers = numbers[..., :num_rows, :depth].flatten(-3, -2)
    return numbers.to(DTYPE).contiguous(), scales.flatten(-3, -2).contiguous()


# All but the one that compares mutated inputs, which torch cannot do in 8 bits: float8_e4m3fn has
# no multiplication.
FP8_OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
