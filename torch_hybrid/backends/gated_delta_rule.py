"""The gated delta rule: choices of its ops."""

from __future__ import annotations

from torch_hybrid.backends.recurrent import CONVOLUTION, OpChoice, chunked_rule
from torch_hybrid.ops.delta_rule import op
from torch_hybrid.ops.delta_rule import op_step_gated as step
from torch_hybrid.specs import DeltaRuleSpec


def sizes_of(spec: DeltaRuleSpec) -> dict[str, int]:
    """Return the sizes of a layer that implementations may limit."""
    return {
        "head_k_dim": spec.head_k_dim,
        "head_v_dim": spec.head_v_dim,
        "num_v_heads": spec.num_v_heads,
    }


STEP = "gated_delta_step"

GATED_DELTA_RULE = chunked_rule(
    "gated_delta_rule",
    CONVOLUTION,
    implementations=op.GATED_IMPLEMENTATIONS,
    sizes=sizes_of,
    mixer=OpChoice(name=STEP, implementations=step.IMPLEMENTATIONS, sizes=sizes_of),
    timed={"head_k_dim": (128,), "head_v_dim": (128,)},
)
