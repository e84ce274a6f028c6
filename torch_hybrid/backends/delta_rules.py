"""Delta rules, gated, of Kimi and of Jet-Nemotron: choices of their ops."""

from __future__ import annotations

from collections.abc import Mapping

from torch_hybrid.backends.recurrent import CONVOLUTION, OpChoice, Recurrence, chunked_rule
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.delta_rule import op, op_step_gated, op_step_kimi
from torch_hybrid.specs import DeltaRuleSpec, JetBlockSpec, KimiDeltaSpec


def sizes_of(spec: DeltaRuleSpec | KimiDeltaSpec | JetBlockSpec) -> dict[str, int]:
    """Return the sizes of a layer that implementations may limit."""
    num_v_heads, head_v_dim, head_k_dim = spec.state_shape
    return {"head_k_dim": head_k_dim, "head_v_dim": head_v_dim, "num_v_heads": num_v_heads}


def _rule(
    name: str,
    forms: Mapping[str, Implementation],
    step: str,
    of_step: Mapping[str, Implementation],
    *,
    opened_from: int,
) -> Recurrence:
    return chunked_rule(
        name,
        CONVOLUTION,
        implementations=forms,
        sizes=sizes_of,
        mixer=OpChoice(name=step, implementations=of_step, sizes=sizes_of),
        timed={"head_k_dim": (128,), "head_v_dim": (128,)},
        opened_from=opened_from,
    )


GATED_DELTA_RULE = _rule(
    "gated_delta_rule",
    op.GATED_IMPLEMENTATIONS,
    "gated_delta_step",
    op_step_gated.IMPLEMENTATIONS,
    opened_from=1,
)
KIMI_DELTA_ATTENTION = _rule(
    "kimi_delta_attention",
    op.KIMI_IMPLEMENTATIONS,
    "kimi_delta_step",
    op_step_kimi.IMPLEMENTATIONS,
    opened_from=16,
)
JET_BLOCK = chunked_rule(
    "gated_delta_rule",
    CONVOLUTION,
    implementations=op.GATED_IMPLEMENTATIONS,
    sizes=sizes_of,
)
