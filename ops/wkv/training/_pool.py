"""Forward without a pool, by the kernels of ``wkv`` on a pool of its own."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.packed import run_on_pool
from torch_hybrid.ops.wkv.op import NOTHING, Wkv
from torch_hybrid.ops.wkv.training.op import WkvForward


def wkv_forward(x: WkvForward, *, by: Implementation) -> tuple[Tensor, Tensor]:
    """Run an implementation of ``wkv``; without initial states, empty sequences leave nothing."""

    def run(pool: Tensor, initial: Tensor, final: Tensor) -> Tensor:
        if x.initial_state is None:
            pool[:, 2] = NOTHING
        given = (x.k, x.v, x.log_decay, x.bonus, pool, x.cu_seqlens, initial, final)
        out: Tensor = by.load()(Wkv(*given, impl=x.impl))
        return out

    return run_on_pool(x, run)
