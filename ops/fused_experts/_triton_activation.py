"""Activation of gate and up in Triton, and what all kernels are told of an op."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from torch_hybrid.ops.fused_experts.op import FusedExperts

# Constants of products whose results are not activated.
NOT_ACTIVATED = {"ACTIVATES": False, "HAS_GATE": False, "LIMIT": None, "SOFTCAPS": None}


def activated(x: FusedExperts) -> dict[str, Any]:
    """Return the constants of ``activate``, which are hashable."""
    softcaps = None if x.softcaps is None else tuple(x.softcaps)
    return {"HAS_GATE": x.has_gate, "LIMIT": x.limit, "SOFTCAPS": softcaps}


def sizes(x: FusedExperts) -> dict[str, int]:
    """Return the sizes of an op's weights, by their letters."""
    return {"E": x.num_experts, "D": x.dim, "I": x.width}


@triton.jit
def activate(
    gate: tl.tensor,
    up: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
) -> tl.tensor:
    """Compute ``silu(gate) * up``, or the square of ``relu(up)`` without a gate.

    LIMIT clamps both. With SOFTCAPS, these bound ``up`` and the factor of the gate's sigmoid.
    """
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


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Compute tanh to float32 precision: a polynomial near 0, where 1 - exp(-2x) would cancel."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    s = x * x
    p = -5.70498872745e-3 * s + 2.06390887954e-2
    p = p * s - 5.37397155531e-2
    p = p * s + 1.33314422036e-1
    p = p * s - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, x + x * s * p, tl.where(x < 0, -far, far))
