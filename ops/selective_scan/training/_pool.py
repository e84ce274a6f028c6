"""Forward without a pool, by the kernels of the chunk form on a pool of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.packed import run_on_pool
from torch_hybrid.ops.core.recurrence import CHUNK
from torch_hybrid.ops.selective_scan.op import SelectiveScan
from torch_hybrid.ops.selective_scan.training.op import SelectiveScanForward


def selective_scan_forward(x: SelectiveScanForward, *, by: Implementation) -> tuple[Tensor, Tensor]:
    """Run an implementation of ``selective_scan``, which takes the logarithms of rates."""
    D = torch.zeros_like(x.A[:, 0]) if x.D is None else x.D

    def run(pool: Tensor, initial: Tensor, final: Tensor) -> Tensor:
        given = (x.x, x.dt, x.B, x.C, x.z, (-x.A).log(), D, pool, x.cu_seqlens, initial, final)
        impl = f"{CHUNK}_{x.impl}"
        out: Tensor = by.load()(SelectiveScan(*given, dt_bias=x.dt_bias, impl=impl))
        return out

    return run_on_pool(x, run)
