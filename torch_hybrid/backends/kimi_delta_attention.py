"""Kimi delta attention: choices of its ops."""

from __future__ import annotations

from torch_hybrid.backends.recurrent import CONVOLUTION, OpChoice, chunked_rule
from torch_hybrid.ops.delta_rule import op
from torch_hybrid.ops.delta_rule import op_step_kimi as step
from torch_hybrid.specs import KimiDeltaSpec


def sizes_of(spec: KimiDeltaSpec) -> dict[str, int]:
    """Return the sizes of a layer that implementations may limit."""
    return {
        "head_k_dim": spec.head_k_dim,
        "head_v_dim": spec.head_v_dim,
        "num_v_heads": spec.num_heads,
    }


STEP = "kimi_delta_step"

KIMI_DELTA_ATTENTION = chunked_rule(
    "kimi_delta_attention",
    CONVOLUTION,
    implementations=op.KIMI_IMPLEMENTATIONS,
    sizes=sizes_of,
    mixer=OpChoice(name=STEP, implementations=step.IMPLEMENTATIONS, sizes=sizes_of),
    timed={"head_k_dim": (128,), "head_v_dim": (128,)},
)
