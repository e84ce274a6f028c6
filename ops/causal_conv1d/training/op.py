"""Short convolution without a pool: initial states go in, final states come out.

The forward runs the kernels of ``causal_conv1d`` on a pool of its own. The backward is an op of its
own, which is given what the forward was given, and convolves again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from torch_hybrid.ops.causal_conv1d.op import IMPLEMENTATIONS, MAX_WIDTH, MIN_WIDTH
from torch_hybrid.ops.conv_step import check_activation
from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Capability, Implementation
from torch_hybrid.ops.core.declare import (
    Dense,
    Index,
    Op,
    Rows,
    define,
    pair_made,
    several_made,
)
from torch_hybrid.ops.core.registration import same_or_first_impl
from torch_hybrid.ops.core.state_bounds import check_offsets

_FOLDER = "torch_hybrid.ops.causal_conv1d.training"
FORWARD: dict[str, Implementation] = {
    name: Implementation(
        capability=each.capability,
        launcher=f"{_FOLDER}._pool:causal_conv1d_forward",
        options={"by": each},
    )
    for name, each in IMPLEMENTATIONS.items()
}
BACKWARD: dict[str, Implementation] = {
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher=f"{_FOLDER}._torch:causal_conv1d_backward",
    )
}


@dataclass(slots=True, repr=False, eq=False)
class TrainedConv1d(Op):
    """Arguments that the forward and its backward have."""

    x: Annotated[Tensor, Rows("C")]
    weight: Annotated[Tensor, Dense("C", "W")]
    bias: Annotated[Tensor | None, Dense("C")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    initial_state: Annotated[Tensor | None, Dense("num_offsets - 1", "W - 1", "C")]
    activation: str = field(kw_only=True)

    @property
    def num_seqs(self) -> int:
        """Number of sequences, empty ones included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def silu(self) -> bool:
        """Flag of the activation SiLU."""
        return self.activation == "silu"

    def states(self, num_seqs: int) -> Tensor:
        """Make empty states of so many sequences."""
        channels, width = self.weight.shape
        return self.x.new_empty(num_seqs, width - 1, channels)

    def check(self) -> None:
        """Raise ValueError for filters or an activation that no implementation takes."""
        check_activation(self.activation)
        width = self.weight.shape[1]
        if not MIN_WIDTH <= width <= MAX_WIDTH:
            raise ValueError(f"weight must have width {MIN_WIDTH} to {MAX_WIDTH}, got {width}")

    def check_indices(self) -> None:
        """Raise ValueError unless sequences are among the tokens."""
        check_offsets(self.cu_seqlens, num_tokens=self.x.shape[0])


@dataclass(slots=True, repr=False, eq=False)
class CausalConv1dForward(TrainedConv1d):
    """Short causal convolution without a pool; ``torch_hybrid.functional`` states it.

    Args:
        x: [T, C], float dtype; weight [C, W] and bias [C] or None in that dtype.
        cu_seqlens: [N + 1] int32, from 0 to at most T.
        initial_state: [N, W - 1, C] in x's dtype, or None for zeros.
        activation: "none" or "silu".
        output_final_state: whether final states are made.
        impl: a name in FORWARD.

    Returns:
        [T, C] outputs, and final states like initial ones, or [0, W - 1, C].
    """

    output_final_state: bool = field(kw_only=True)


@dataclass(slots=True, repr=False, eq=False)
class CausalConv1dBackward(TrainedConv1d):
    """Gradients of :func:`causal_conv1d_forward`, in fixed orders of sums.

    Args:
        x, weight, bias, cu_seqlens, initial_state, activation: those of the forward.
        dout: [T, C] gradient of the outputs, in x's dtype.
        dfinal_state: [N, W - 1, C] gradient of the final states, or None for zeros.
        impl: a name in BACKWARD.

    Returns:
        Gradients of x, weight, bias and the initial state; empty where these are None.
    """

    dout: Annotated[Tensor, Rows("C")]
    dfinal_state: Annotated[Tensor | None, Dense("num_offsets - 1", "W - 1", "C")]


def empty_results(x: CausalConv1dForward) -> tuple[Tensor, Tensor]:
    """Make the tensors that the forward returns."""
    return x.x.new_empty(x.x.shape), x.states(x.num_seqs if x.output_final_state else 0)


def empty_gradients(x: TrainedConv1d) -> tuple[Tensor, ...]:
    """Make the tensors that the backward returns."""
    bias = 0 if x.bias is None else x.bias.shape[0]
    states = x.states(0 if x.initial_state is None else x.num_seqs)
    return x.x.new_empty(x.x.shape), torch.empty_like(x.weight), x.weight.new_empty(bias), states


def _gradients(
    backward: Callable[..., tuple[Tensor, ...]],
    ctx: Any,
    dout: Tensor | None,
    dfinal_state: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Call the backward op on what the forward saved."""
    saved = ctx.saved_tensors  # which activation checkpointing gives once
    x, _, bias, _, initial_state = saved
    dfinal = dfinal_state if ctx.options["output_final_state"] else None
    dx, dweight, dbias, dstate = backward(
        *saved,
        torch.zeros_like(x) if dout is None else dout.contiguous(),
        None if dfinal is None else dfinal.contiguous(),
        activation=ctx.options["activation"],
        impl=same_or_first_impl("causal_conv1d_backward", ctx.options["impl"], x.device, x.dtype),
    )
    no_bias, no_state = bias is None, initial_state is None
    return dx, dweight, None if no_bias else dbias, None, None if no_state else dstate


causal_conv1d_backward = define(
    CausalConv1dBackward,
    BACKWARD,
    returns=several_made(4, empty_gradients),
    flops="6 * T * C * W",
)
causal_conv1d_forward = define(
    CausalConv1dForward,
    FORWARD,
    returns=pair_made(empty_results),
    backward=partial(_gradients, causal_conv1d_backward),
    flops="2 * T * C * W",
)
