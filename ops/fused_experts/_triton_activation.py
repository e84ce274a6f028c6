# mypy: disable-error-code="untyped-decorator"
"""What becomes of gate and up, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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
        if SOFTCAPS is not None:
            gate_over, gate_under = _tanh(gate * (1 / SOFTCAPS[0]))
            up_over, up_under = _tanh(up * (1 / SOFTCAPS[1]))
            up = SOFTCAPS[0] * SOFTCAPS[1] * gate_over * up_over
            up /= (1 + tl.exp(-gate)) * (gate_under * up_under)
        else:
            up *= gate / (1 + tl.exp(-gate))
    else:
        up = tl.maximum(up, 0.0)
        up *= up
    return up


@triton.jit
def _tanh(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A fraction that is tanh to float32 precision: near 0, where 1 - exp(-2x) would cancel, a
    polynomial of an error below 2e-8 over 1."""
    t = tl.exp(-2.0 * tl.abs(x))
    s = x * x
    p = -5.70498872745e-3 * s + 2.06390887954e-2
    p = p * s - 5.37397155531e-2
    p = p * s + 1.33314422036e-1
    p = p * s - 3.33332819422e-1
    near = tl.abs(x) < 0.625
    over = tl.where(near, x + x * s * p, tl.where(x < 0, t - 1, 1 - t))
    return over, tl.where(near, 1.0, 1 + t)
