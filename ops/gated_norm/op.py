"""RMS norms of groups of channels, gated before or after, whose backward normalises again.

Torch takes eight passes over the rows forwards, and some twenty back. On a CPU these take one and
two; on a GPU a compiler fuses what the modules of transformers say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import Cpp, Dense, Op, Rows, define, like, several_made
from torch_hybrid.ops.core.registration import same_or_first_impl
from torch_hybrid.ops.implementations import in_cpp, in_torch

ACTIVATIONS = ("silu", "sigmoid")


def _implementations(launcher: str) -> dict[str, Implementation]:
    folder = "torch_hybrid.ops.gated_norm"
    return {
        "cpp": in_cpp(f"{folder}._cpu.cpp:{launcher}"),
        "torch": in_torch(f"{folder}._torch:{launcher}", dtypes=FLOATS_AND_FLOAT64),
    }


@dataclass(slots=True, repr=False, eq=False)
class GatedNorm(Op):
    """Arguments that the forward and its backward have."""

    x: Annotated[Tensor, Rows("D")]
    gate: Annotated[Tensor, Rows("D")]
    weight: Annotated[Tensor, Dense("D", dtype="work")]
    group_size: int = field(kw_only=True)
    eps: float = field(kw_only=True)
    activation: str = field(kw_only=True)
    gates_first: bool = field(kw_only=True)

    @property
    def silu(self) -> bool:
        """Flag of the activation SiLU."""
        return self.activation == "silu"

    def check(self) -> None:
        """Raise ValueError unless groups divide the channels and the activation is known."""
        width = self.x.shape[1]
        if self.group_size < 1 or width % self.group_size:
            raise ValueError(
                f"group_size must divide the {width} channels of x, got {self.group_size}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {self.activation!r}")


@dataclass(slots=True, repr=False, eq=False)
class GatedNormForward(GatedNorm):
    """``weight norm(x) act(gate)``, or ``weight norm(x act(gate))``; sums are float32 at least.

    Args:
        x: [T, D], float dtype. gate [T, D] in that dtype.
        weight: [D] float32, or float64 beside float64.
        group_size: channels that are normalised together.
        eps: added to the mean of squares.
        activation: of the gate, "silu" or "sigmoid".
        gates_first: whether the gate multiplies x, and not what is normalised.

    Returns:
        [T, D] in x's dtype.
    """


@dataclass(slots=True, repr=False, eq=False)
class GatedNormBackward(GatedNorm):
    """Gradients of :func:`gated_norm_forward`; sums over rows have one order.

    Args:
        x, gate, weight, group_size, eps, activation, gates_first: those of the forward.
        dout: [T, D] gradient of the outputs, in x's dtype.

    Returns:
        Gradients of x, gate and weight.
    """

    dout: Annotated[Tensor, Rows("D")]


def empty_gradients(x: GatedNorm) -> tuple[Tensor, ...]:
    """Make the tensors that the backward returns."""
    return tuple(each.new_empty(each.shape) for each in (x.x, x.gate, x.weight))


gated_norm_backward = define(
    GatedNormBackward,
    _implementations("gated_norm_backward"),
    returns=several_made(3, empty_gradients),
    cpp=Cpp("D=width"),
)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
    x, gate, weight = ctx.saved_tensors
    options = dict(ctx.options)
    impl = same_or_first_impl("gated_norm_backward", options.pop("impl"), x.device, x.dtype)
    return gated_norm_backward(x, gate, weight, dout.contiguous(), **options, impl=impl)


gated_norm_forward = define(
    GatedNormForward,
    _implementations("gated_norm_forward"),
    returns=like("x"),
    backward=_gradients,
    cpp=Cpp("D=width"),
)
