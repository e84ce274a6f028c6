"""Depthwise causal convolution over ragged sequences, with its state updated in place by slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torch import Tensor

from torch_hybrid.ops.conv_step import check_activation
from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, Rows, StatefulOp, define, like
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton

MIN_WIDTH, MAX_WIDTH = 2, 16

_PACKAGE = "torch_hybrid.ops.causal_conv1d"

IMPLEMENTATIONS = {
    "cpp": in_cpp(f"{_PACKAGE}._cpu.cpp:causal_conv1d", features=INVARIANT),
    "triton": in_triton(f"{_PACKAGE}._triton:causal_conv1d", features=INVARIANT),
    "torch": in_torch(f"{_PACKAGE}._torch:causal_conv1d", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class CausalConv1d(StatefulOp):
    """Convolution of each channel of each sequence with its own short filter over the past.

    ``out[t] = act(bias + sum_w weight[:, w] * x[t - W + 1 + w])``, where the inputs before the
    first token of a sequence come from its state. Arithmetic is float32, of float64 tensors
    float64. With gates, what is convolved and kept is ``input_gate * x``, rounded to x's dtype, and
    ``out`` is multiplied by ``output_gate``. With taps of each token, those are added to the
    filters of its output.

    Args:
        x: [T, C] inputs, the sequences packed one after the other. Float dtype; rows may lie any
            distance apart (a slice of a projection), one row is contiguous.
        weight: [C, W] filter of each channel, oldest tap first, in x's dtype; W from 2 to 16.
        bias: [C] in x's dtype, or None.
        conv_state: [S, W - 1, C] the last inputs of each sequence, oldest first, in x's dtype.
            **Mutated**: slot ``state_indices[n]`` receives the last W - 1 inputs of sequence n,
            older ones shifted in from the state when it is shorter; no other slot is written.
        activation: "none" or "silu".
        input_gate, output_gate: [T, C] like x, or None. Those of padding tokens are not read.
        token_taps: [T, H, W] contiguous, in x's dtype: what is added to the filters of the C / H
            channels of each head, oldest tap first; or None. Without gates alone. Those of padding
            tokens are not read.

    Returns:
        [T, C] outputs in x's dtype; rows of padding tokens are exactly 0.

    The short convolution of Mamba (arXiv 2312.00752), Qwen3-Next and most linear attention; with
    both gates, that of LFM2; with taps of each token, that of Inkling-2's keys and values.
    """

    pool_name: ClassVar[str] = "conv_state"

    x: Annotated[Tensor, Rows("C")]
    weight: Annotated[Tensor, Dense("C", "W")]
    bias: Annotated[Tensor | None, Dense("C")]
    conv_state: Annotated[Tensor, Pool("W - 1", "C")]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    activation: str = field(kw_only=True)
    input_gate: Annotated[Tensor | None, Rows("C")] = field(default=None, kw_only=True)
    output_gate: Annotated[Tensor | None, Rows("C")] = field(default=None, kw_only=True)
    token_taps: Annotated[Tensor | None, Dense("T", "H", "W")] = field(default=None, kw_only=True)

    def check(self) -> None:
        """Raise ValueError for filters, an activation or taps that no implementation takes."""
        check_activation(self.activation)
        channels, width = self.weight.shape
        if not MIN_WIDTH <= width <= MAX_WIDTH:
            raise ValueError(f"weight must have width {MIN_WIDTH} to {MAX_WIDTH}, got {width}")
        if self.token_taps is None:
            return
        if not self.num_heads or channels % self.num_heads:
            raise ValueError(
                f"token_taps must have heads that divide {channels} channels, got {self.num_heads}"
            )
        if self.input_gate is not None or self.output_gate is not None:
            raise ValueError("token_taps must be of a convolution without gates")

    @property
    def silu(self) -> bool:
        """Flag of the activation SiLU."""
        return self.activation == "silu"

    @property
    def num_heads(self) -> int:
        """Heads whose channels share the taps of a token; 1 without such taps."""
        return 1 if self.token_taps is None else self.token_taps.shape[1]


causal_conv1d = define(
    CausalConv1d,
    IMPLEMENTATIONS,
    returns=like("x"),
    flops="2 * T * C * W",
    cpp=Cpp("C=channels W=width"),
)
