"""Forward without a pool, by the kernels of ``causal_conv1d`` on a pool of its own."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.causal_conv1d.op import CausalConv1d
from torch_hybrid.ops.causal_conv1d.training.op import CausalConv1dForward
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.packed import run_on_pool


def causal_conv1d_forward(x: CausalConv1dForward, *, by: Implementation) -> tuple[Tensor, Tensor]:
    """Run an implementation of ``causal_conv1d``."""

    def run(pool: Tensor, initial: Tensor, final: Tensor) -> Tensor:
        given = (x.x, x.weight, x.bias, pool, x.cu_seqlens, initial, final)
        out: Tensor = by.load()(CausalConv1d(*given, activation=x.activation, impl=x.impl))
        return out

    return run_on_pool(x, run)
