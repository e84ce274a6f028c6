# mypy: disable-error-code="untyped-decorator"
"""What becomes of gate and up, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_hybrid.ops.triton.softmax import tanh


@triton.jit
def activate(
    gate: tl.tensor,
    up: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
) -> tl.tensor:
    """``silu(gate) * up``, both within LIMIT where there is one; with SOFTCAPS, what the gate's
    sigmoid is multiplied by and ``up`` are bound by these; without a gate, the square of the
    positive part of ``up``."""
    if HAS_GATE:
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        factor = gate
        if SOFTCAPS is not None:
            factor = SOFTCAPS[0] * tanh(gate * (1 / SOFTCAPS[0]))
            up = SOFTCAPS[1] * tanh(up * (1 / SOFTCAPS[1]))
        up *= factor / (1 + tl.exp(-gate))
    else:
        up = tl.maximum(up, 0.0)
        up *= up
    return up
