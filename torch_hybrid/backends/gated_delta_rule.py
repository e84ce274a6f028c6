"""The gated delta rule: its ops, and how a layer runs them."""

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
from torch_hybrid.ops.delta_rule import op_step_gated as step
from torch_hybrid.specs import DeltaRuleSpec


def _sizes(spec: DeltaRuleSpec) -> dict[str, int]:
    return {
        "head_k_dim": spec.head_k_dim,
        "head_v_dim": spec.head_v_dim,
        "num_v_heads": spec.num_v_heads,
    }


STEP = "gated_delta_step"

GATED_DELTA_RULE = chunked_rule(
    "gated_delta_rule",
    CONVOLUTION,
    recurrent=op.GATED_RECURRENT_IMPLEMENTATIONS,
    chunk=op.GATED_CHUNK_IMPLEMENTATIONS,
    sizes=_sizes,
    whole=OpChoice(name=STEP, implementations=step.IMPLEMENTATIONS, sizes=_sizes),
    timed={"head_k_dim": (128,), "head_v_dim": (128,)},
)
_FORMS = {
    "recurrent_gated_delta_rule": op.recurrent_gated_delta_rule,
    "chunk_gated_delta_rule": op.chunk_gated_delta_rule,
}


def apply_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spec: DeltaRuleSpec,
    plan: RecurrentPlan,
    state: Tensor,
) -> Tensor:
    """Apply the gated delta rule to q, k [T, H, K] and v [T, HV, V] -> [T, HV, V].

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
