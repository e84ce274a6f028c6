"""Mamba's selective scan: its op, and how layers run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from torch_hybrid.backends.recurrent import CONVOLUTION, RecurrentPlan, chunked_rule, rule_of
from torch_hybrid.ops.selective_scan import op

MAMBA = chunked_rule(
    "selective_scan",
    CONVOLUTION,
    recurrent=op.RECURRENT_IMPLEMENTATIONS,
    chunk=op.CHUNK_IMPLEMENTATIONS,
    sizes=lambda spec: {"state_dim": spec.state_dim},
)
_FORMS: Mapping[str, Callable[..., Tensor]] = {
    "recurrent_selective_scan": op.recurrent_selective_scan,
    "chunk_selective_scan": op.chunk_selective_scan,
}


def apply_selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor,
    A_log: Tensor,
    D: Tensor,
    plan: RecurrentPlan,
    state: Tensor,
) -> Tensor:
    """The scan over x [T, channels], with B and C [T, G, N] of equal parts of the channels;
    advances ``state``."""
    rule, impl = rule_of(plan, _FORMS)
    return rule(
        x,
        dt,
        B,
        C,
        z,
        A_log,
        D,
        state,
        plan.cu_seqlens,
        plan.initial_indices,
        plan.state_indices,
        impl=impl,
    )
