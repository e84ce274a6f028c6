"""One token of each sequence through a Mamba2 mixer, between its projections.

The convolution, the step sizes, the recurrence, the gate and the norm of a decode step in one op:
each by itself takes little, and costs as much again to be called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_activation, check_width
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, Rows, define, made
from torch_hybrid.ops.open_chunk import ADDED, ChunkLayout, OpenStep
from torch_hybrid.ops.step_implementations import step_implementations

IMPLEMENTATIONS = step_implementations(
    "ssd_step",
    "ssd",
    "mamba2",
    limits={"head_k_dim": 512},
    composed="torch_hybrid.ops.ssd._composed:mamba2",
    opens_chunks=True,
)


@dataclass(slots=True, repr=False, eq=False)
class SsdStep(OpenStep):
    """Step of a mixer: convolve, advance the states by one token, and gate and norm what is read
    from them; or verify drafts.

        x, B, C = act(convolution of xBC and the last inputs), rounded to the dtype
        step = clamp(softplus(dt + dt_bias), dt_min, dt_max)         of each head
        S = exp(-exp(A_log) step) S + (step x) B^T
        o = S C + D x, rounded to the dtype
        y = o silu(z);  out = norm_weight y / rms(y)                 or, norm before gate:
        y = o;          out = norm_weight y / rms(y) silu(z)

    It is ``causal_conv1d``, the step sizes, ``ssd`` and the gated norm of a layer one
    after the other, with the same roundings between them. Head ``h`` reads group
    ``h // (H // G)`` of B and C, and all arithmetic is float32.

    Args:
        xBC: [T, H V + 2 G K] inputs of the convolution, a row for each token. Float dtype; rows
            may lie any distance apart (a slice of a projection), one row is contiguous; so for z
            and dt. H, V and K are those of ``state``.
        z: [T, H V] gate of the output, in xBC's dtype, or None: o is returned as it is.
        dt: [T, H] step size before its softplus, in xBC's dtype.
        conv_weight: [H V + 2 G K, W] filter of each channel, oldest tap first, in xBC's dtype; W
            from 2 to 8.
        conv_bias: [H V + 2 G K] in xBC's dtype, or None.
        A_log, dt_bias, D: [H], each in xBC's dtype or in float32.
        norm_weight: [H V] in xBC's dtype or in float32, or None: y is returned.
        conv_state: [S, W - 1, H V + 2 G K] the last inputs of each sequence, oldest first, in
            xBC's dtype. **Mutated**: slot ``state_indices[n]`` receives those of sequence n.
        state: [S, H, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the token of sequence n. No other slot of either pool is written.
        activation: of the convolution, "none" or "silu".
        dt_min, dt_max: bounds of the step size; 0 and infinity where there are none.
        norm_before_gate: whether o is normed, and not its product with the gate.
        norm_groups: equal parts of a token's H V channels, each normed by itself.
        norm_eps: added to the mean square of a part.
        records: [S, R, H V + 2 G K + H] a row ``[xBC | dt]`` of inputs for each draft, in xBC's
            dtype, where the step verifies drafts; else None. **Mutated**: slot
            ``state_indices[n]`` receives those of the second token on.

    Returns:
        [T, H V] in xBC's dtype; rows of padding tokens are exactly 0.

    The mixer of "Transformers are SSMs" (Mamba2, arXiv 2405.21060), as in Nemotron-H.
    """

    recorded: ClassVar[tuple[str, ...]] = ("xBC", "dt")
    read: ClassVar[tuple[str, ...]] = ("z",)
    pools: ClassVar[tuple[str, ...]] = ("conv_state", "state")
    per_token: ClassVar[tuple[str, ...]] = (*recorded, *read)
    layout: ClassVar[ChunkLayout] = ADDED

    xBC: Annotated[Tensor, Rows("C")]
    z: Annotated[Tensor | None, Rows("H * V")]
    dt: Annotated[Tensor, Rows("H", counts=False)]
    conv_weight: Annotated[Tensor, Dense("C", "W")]
    conv_bias: Annotated[Tensor | None, Dense("C")]
    A_log: Annotated[Tensor, Dense("H", or_float32=True, counts=False)]
    dt_bias: Annotated[Tensor, Dense("H", or_float32=True, counts=False)]
    D: Annotated[Tensor, Dense("H", or_float32=True, counts=False)]
    norm_weight: Annotated[Tensor | None, Dense("H * V", or_float32=True)]
    conv_state: Annotated[Tensor, Pool("W - 1", "C", counts=False)]
    state: Annotated[Tensor, Pool("H", "V", "K", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    activation: str = field(kw_only=True)
    dt_min: float = field(kw_only=True)
    dt_max: float = field(kw_only=True)
    norm_before_gate: bool = field(kw_only=True)
    norm_groups: int = field(kw_only=True)
    norm_eps: float = field(kw_only=True)
    records: Annotated[Tensor | None, Pool("D_", "C + H")] = field(default=None, kw_only=True)

    @property
    def inner(self) -> int:
        """Channels of x, and of the outputs."""
        return self.state.shape[1] * self.state.shape[2]

    @property
    def num_k_heads(self) -> int:
        """Groups of B and C."""
        return (self.xBC.shape[1] - self.inner) // (2 * self.state.shape[3])

    def check_form(self) -> None:
        """Raise ValueError for filters without a kernel, for a norm without a gate, and unless B
        and C take what x leaves."""
        self.check_ndims(xBC=2, state=4, conv_weight=2)
        if self.z is None and self.norm_weight is not None:
            raise ValueError("norm_weight must be None where z is None: what is normed has a gate")
        check_width(self.conv_weight)
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise ValueError unless B and C are whole groups, which divide the heads."""
        channels, (num_heads, _, k_dim) = self.xBC.shape[1], self.state.shape[1:]
        of_groups = channels - self.inner
        num_groups = of_groups // (2 * k_dim)
        if num_groups < 1 or of_groups % (2 * k_dim) or num_heads % num_groups:
            raise ValueError(
                f"xBC must have {self.inner} + 2 G {k_dim} channels, where G divides the "
                f"{num_heads} heads of state, got {channels}"
            )

    def check(self) -> None:
        """Raise ValueError for an unknown activation, empty bounds of step sizes, groups that do
        not divide the channels, and misfit records or chunks."""
        OpenStep.check(self)
        check_activation(self.activation)
        if not 0 <= self.dt_min <= self.dt_max:
            raise ValueError(
                f"dt_min and dt_max must rise from 0, got {self.dt_min} and {self.dt_max}"
            )
        if self.norm_groups < 1 or self.inner % self.norm_groups:
            raise ValueError(
                f"norm_groups must divide the {self.inner} channels of x, got {self.norm_groups}"
            )


def empty_outputs(x: SsdStep) -> Tensor:
    """Make the outputs [T, H V] of all heads."""
    return x.xBC.new_empty(x.xBC.shape[0], x.inner)


ssd_step = define(
    SsdStep,
    IMPLEMENTATIONS,
    returns=made(empty_outputs),
    limited={"head_k_dim": "K"},
    flops="2 * T * C * W + 4 * T * H * V * K",
    cpp=Cpp(
        "C=channels W=width H=num_v_heads V=v_dim K=k_dim",
        {
            "silu": "x.activation == 'silu'",
            "wide_norm": "x.norm_weight is not None and x.norm_weight.dtype is float32",
            "num_records": "0 if x.records is None else x.records.shape[1]",
            "record_width": "0 if x.records is None else x.records.shape[2]",
        },
    ),
)
