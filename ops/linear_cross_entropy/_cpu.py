"""Implementation "cpp": products of torch, and losses of rows in C++."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.linear_cross_entropy import _torch
from torch_hybrid.ops.linear_cross_entropy.op import LinearCrossEntropyForward
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "cross_entropy",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="logits targets losses",
    integers="num_rows width differentiates is_bf16 num_threads",
    numbers="softcap",
)


def _differentiated(x: LinearCrossEntropyForward, z: Tensor, targets: Tensor) -> Tensor:
    """Put the gradients of losses in the place of logits, and sum losses."""
    losses = torch.empty(len(z), dtype=torch.float32, device=z.device)
    _RUN(
        *(z, targets, losses, *z.shape, x.of_hidden or x.of_weight),
        *(z.dtype is torch.bfloat16, torch.get_num_threads(), x.softcap or 0.0),
    )
    return losses.sum()


linear_cross_entropy_forward = partial(
    _torch.linear_cross_entropy_forward, differentiated=_differentiated
)
