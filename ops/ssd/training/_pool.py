"""Forward without a pool, by the kernels of the chunk form on a pool of its own."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.packed import run_on_pool
from torch_hybrid.ops.core.recurrence import CHUNK
from torch_hybrid.ops.ssd.op import Ssd
from torch_hybrid.ops.ssd.training.op import SsdForward


def ssd_forward(x: SsdForward, *, by: Implementation) -> tuple[Tensor, Tensor]:
    """Run an implementation of ``ssd``."""

    def run(pool: Tensor, initial: Tensor, final: Tensor) -> Tensor:
        given = (x.q, x.k, x.v, x.g, x.dt, x.D, pool, x.cu_seqlens, initial, final)
        out: Tensor = by.load()(Ssd(*given, scale=x.scale, impl=f"{CHUNK}_{x.impl}"))
        return out

    return run_on_pool(x, run)
