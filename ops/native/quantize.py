"""Weights on a CPU to numbers of 8 or 4 bits or FP4, and their scales, in one pass over memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "quantize",
    Path(__file__).with_name("quantize.cpp"),
    tensors="weight numbers scales",
    integers="rows depth group is_fp4 is_bf16 num_threads",
)


def quantize(weight: Tensor, numbers: Tensor, scales: Tensor, group: int) -> None:
    """Fill ``numbers`` and ``scales`` with a weight [N, K] in INT8, INT4 or FP4.

    INT4 scales minimise squared errors, which are summed in another order than torch's: of two
    scales with nearly equal errors either may be taken. Those of FP4 are the same bits.

    Args:
        weight: [N, K] float.
        numbers: [N, K] int8, or [N, K / 2] uint8, or [N, K / 8] int32 of FP4. **Mutated**.
        scales: [N], or [N, K / group], float32. Of FP4 uint8, [N, K / 32] or [N, K / 16 + 4].
            **Mutated**.
        group: weights of INT4 or FP4 that share a scale; 0 for INT8.
    """
    if weight.dtype != torch.bfloat16:
        weight = weight.float()
    _RUN(
        weight.contiguous(),
        numbers,
        scales,
        *weight.shape,
        group,
        numbers.dtype is torch.int32,
        weight.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
