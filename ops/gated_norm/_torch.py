"""Gated norms in vectorised torch."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.gated_norm.op import GatedNorm, GatedNormBackward, GatedNormForward
from torch_hybrid.ops.pointwise import sigmoid


@without_autocast
def gated_norm_forward(x: GatedNormForward) -> Tensor:
    """Normalise, and gate before or after."""
    _rows, _sigmoid, act, _inverse, normed = _parts(x)
    y = x.weight * normed.flatten(-2)
    return (y if x.gates_first else y * act).to(x.x.dtype)


@without_autocast
def gated_norm_backward(x: GatedNormBackward) -> tuple[Tensor, ...]:
    """Compute the gradients of x, gate and weight."""
    rows, s, act, inverse, normed = _parts(x)
    dout, gate = x.dout.to(x.weight.dtype), x.gate.to(x.weight.dtype)
    scaled = dout if x.gates_first else dout * act
    dnormed = (scaled * x.weight).unflatten(-1, (-1, x.group_size))
    along = (dnormed * normed).mean(-1, keepdim=True)
    drows = (inverse * (dnormed - normed * along)).flatten(-2)
    normed = normed.flatten(-2)
    dact = drows * rows if x.gates_first else dout * x.weight * normed
    dgate = dact * s * (1 + gate * (1 - s) if x.silu else 1 - s)
    dx = drows * act if x.gates_first else drows
    return dx.to(x.x.dtype), dgate.to(x.x.dtype), (scaled * normed).sum(0)


def _parts(x: GatedNorm) -> tuple[Tensor, ...]:
    """Compute rows, the sigmoid of gates and their activation [T, D]; then by groups the inverses
    of sizes and the normalised."""
    rows, gate = x.x.to(x.weight.dtype), x.gate.to(x.weight.dtype)
    s = sigmoid(gate)
    act = gate * s if x.silu else s
    groups = (rows * act if x.gates_first else rows).unflatten(-1, (-1, x.group_size))
    inverse = (groups.square().mean(-1, keepdim=True) + x.eps).rsqrt()
    return rows, s, act, inverse, groups * inverse
