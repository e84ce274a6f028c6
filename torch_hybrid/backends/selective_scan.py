"""Mamba's selective scan: its op, and how layers run it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_hybrid.backends.recurrent import CONVOLUTION, At, RecurrentPlan, chunked_rule
from torch_hybrid.backends.replay import walk
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.ops.selective_scan import op
from torch_hybrid.specs import STATE_RECORDS

MAMBA = chunked_rule(
    "selective_scan",
    CONVOLUTION,
    implementations=op.IMPLEMENTATIONS,
    sizes=lambda spec: {"state_dim": spec.state_dim},
)


def apply_selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor | None,
    plan: RecurrentPlan,
    cache: LayerCache,
) -> Tensor:
    """Scan x [T, channels] -> [T, channels], and advance the state in ``cache``.

    B and C [T, G, N] belong to G equal parts of the channels. Records of drafts hold dt before its
    bias.
    """

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
        (x, dt, B), (C, z) = advancing, reading
        return op.selective_scan(
            x,
            dt,
            B,
            C,
            z,
            A_log,
            D,
            cache["state"],
            at.cu_seqlens,
            at.initial_indices,
            at.state_indices,
            impl=plan.statics.impl("selective_scan"),
            dt_bias=dt_bias,
        )

    return walk(run, [x, dt, B], [C, z], plan, cache, STATE_RECORDS)
