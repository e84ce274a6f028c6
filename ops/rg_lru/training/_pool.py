"""Forward without a pool, by the kernels of ``rg_lru`` on a pool of its own."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.packed import run_on_pool
from torch_hybrid.ops.rg_lru.op import RgLru
from torch_hybrid.ops.rg_lru.training.op import RgLruForward


def rg_lru_forward(x: RgLruForward, *, by: Implementation) -> tuple[Tensor, Tensor]:
    """Run an implementation of ``rg_lru``."""

    def run(pool: Tensor, initial: Tensor, final: Tensor) -> Tensor:
        given = (x.x, x.gates, x.log_a, pool, x.cu_seqlens, initial, final)
        out: Tensor = by.load()(RgLru(*given, impl=x.impl))
        return out

    return run_on_pool(x, run)
