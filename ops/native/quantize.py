"""Weights on a CPU to numbers of 8 or 4 bits and their scales, in one pass over memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "quantize",
    Path(__file__).with_name("quantize.cpp"),
    tensors="weight numbers scales",
    integers="rows depth group is_bf16 num_threads",
)


def quantize(weight: Tensor, numbers: Tensor, scales: Tensor, group: int) -> None:
    """Fill numbers and scales with those of a weight [N, K].

    Of 4 bits, sums of squared errors are added up in another order than torch's: of two scales with
    nearly the same either may be taken.

    Args:
        weight: [N, K] float.
        numbers: [N, K] int8, or [N, K / 2] uint8.
        scales: [N], or [N, K / group], float32.
        group: of 4 bits; 0 of 8.
    """
    if weight.dtype != torch.bfloat16:
        weight = weight.float()
    _RUN(
        weight.contiguous(),
        numbers,
        scales,
        *weight.shape,
        group,
        weight.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
