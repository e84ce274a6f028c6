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
    """Fill ``numbers`` and ``scales`` with the INT8 or INT4 quantization of a weight [N, K].

    INT4 scales minimise squared errors, which are summed in another order than torch's: of two
    scales with nearly equal errors either may be taken.

    Args:
        weight: [N, K] float.
        numbers: [N, K] int8, or [N, K / 2] uint8. **Mutated**.
        scales: [N], or [N, K / group], float32. **Mutated**.
        group: weights of INT4 that share a scale; 0 for INT8.
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
