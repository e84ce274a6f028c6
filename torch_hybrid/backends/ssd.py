"""Scalar-decay recurrences, Mamba2 and lightning attention: their op, and how layers run it."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.backends.recurrent import Recurrence, RecurrentPlan
from torch_hybrid.ops.ssd import op

MAMBA2 = Recurrence(
    name="ssd",
    recurrent=op.RECURRENT_IMPLEMENTATIONS,
    chunk=op.CHUNK_IMPLEMENTATIONS,
    sizes=lambda spec: {"head_k_dim": spec.state_dim, "head_v_dim": spec.head_dim},
)
LIGHTNING_ATTENTION = Recurrence(
    name="ssd",
    recurrent=op.RECURRENT_IMPLEMENTATIONS,
    chunk=op.CHUNK_IMPLEMENTATIONS,
    sizes=lambda spec: {"head_k_dim": spec.head_dim, "head_v_dim": spec.head_dim},
    convolved=False,
)


def apply_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    plan: RecurrentPlan,
    state: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The recurrence over q, k [T, G, K] and v [T, H, V] -> [T, H, V]; advances ``state``."""
    form = op.chunk_ssd if plan.statics.chunked else op.recurrent_ssd
    return form(
        q,
        k,
        v,
        g,
        dt,
        D,
        state,
        plan.cu_seqlens,
        plan.state_indices,
        plan.has_initial_state,
        scale=scale,
        impl=plan.statics.rule_impl,
    )
