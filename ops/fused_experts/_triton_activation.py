# mypy: disable-error-code="untyped-decorator"
"""Activation of gate and up projections, in Triton."""

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
    """Activate projections: ``silu(gate) * up``, or ``relu(up) ** 2`` without a gate.

    LIMIT clamps gate from above, and up on both sides. SOFTCAPS bound the factor of the gate's
    sigmoid, and up, by ``cap tanh(. / cap)``.
    """
    if HAS_GATE:
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        factor = gate
        if SOFTCAPS is not None:
            factor = SOFTCAPS[0] * _tanh(gate * (1 / SOFTCAPS[0]))
            up = SOFTCAPS[1] * _tanh(up * (1 / SOFTCAPS[1]))
        up *= factor / (1 + tl.exp(-gate))
    else:
        up = tl.maximum(up, 0.0)
        up *= up
    return up


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Compute tanh to float32 precision: a polynomial near 0, where 1 - exp(-2x) would cancel."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    s = x * x
    p = -5.70498872745e-3 * s + 2.06390887954e-2
    p = p * s - 5.37397155531e-2
    p = p * s + 1.33314422036e-1
    p = p * s - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, x + x * s * p, tl.where(x < 0, -far, far))
