"""Kimi delta attention: its ops, and how a layer runs them."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.backends.planned import planned_for
from torch_hybrid.backends.recurrent import (
    CONVOLUTION,
    OpChoice,
    RecurrentPlan,
    chunked_rule,
    rule_of,
)
from torch_hybrid.ops.delta_rule import op
from torch_hybrid.ops.delta_rule import op_step_kimi as step
from torch_hybrid.specs import KimiDeltaSpec


def _sizes(spec: KimiDeltaSpec) -> dict[str, int]:
    return {
        "head_k_dim": spec.head_k_dim,
        "head_v_dim": spec.head_v_dim,
        "num_v_heads": spec.num_heads,
    }


STEP = "kimi_delta_step"

KIMI_DELTA_ATTENTION = chunked_rule(
    "kimi_delta_attention",
    CONVOLUTION,
    recurrent=op.KIMI_RECURRENT_IMPLEMENTATIONS,
    chunk=op.KIMI_CHUNK_IMPLEMENTATIONS,
    sizes=_sizes,
    whole=OpChoice(name=STEP, implementations=step.IMPLEMENTATIONS, sizes=_sizes),
    timed={"head_k_dim": (128,), "head_v_dim": (128,)},
)
_FORMS = {
    "recurrent_kimi_delta_attention": op.recurrent_kimi_delta_attention,
    "chunk_kimi_delta_attention": op.chunk_kimi_delta_attention,
}


def apply_kimi_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spec: KimiDeltaSpec,
    plan: RecurrentPlan,
    state: Tensor,
) -> Tensor:
    """Apply Kimi delta attention to q, k, g [T, H, K] and v [T, H, V] -> [T, H, V].

    Mutates the pool ``state`` at the slots that the plan names.
    """
    rule, impl = rule_of(plan, _FORMS)
    planned = planned_for(plan.planned, _sizes(spec))
    options = {"planned": planned} if planned else {}
    return rule(
        q,
        k,
        v,
        g,
        beta,
        state,
        plan.cu_seqlens,
        plan.initial_indices,
        plan.state_indices,
        scale=spec.head_k_dim**-0.5,
        qk_l2norm=True,
        impl=impl,
        **options,
    )
