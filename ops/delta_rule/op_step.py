"""Arguments of the delta rules' steps, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_activation, check_width
from torch_hybrid.ops.core.declare import Dense, Index, Pool, Rows
from torch_hybrid.ops.open_chunk import CORRECTED, ChunkLayout, OpenStep


@dataclass(slots=True, repr=False, eq=False)
class DeltaStep(OpenStep):
    """Arguments of a delta rule's step; the ops' classes derive from it.

    A rule with decays by channel declares ``a``, ``dt_bias`` and ``records`` anew.

    Args:
        qkv: [T, 2 H K + HV V] inputs of the convolution, a row for each token. Float dtype; rows
            may lie any distance apart (a slice of a projection), one row is contiguous; so for z,
            b and a. K, V and HV are those of ``state``.
        z: [T, HV V] gate of the output, in qkv's dtype.
        b: [T, HV] step size before its sigmoid, in qkv's dtype.
        conv_weight: [2 H K + HV V, W] filter of each channel, oldest tap first, in
            qkv's dtype; W from 2 to 8.
        conv_bias: [2 H K + HV V] in qkv's dtype, or None.
        norm_weight: [V] in qkv's dtype or in float32.
        conv_state: [S, W - 1, 2 H K + HV V] the last inputs of each sequence, oldest first, in
            qkv's dtype. **Mutated**: slot ``state_indices[n]`` receives those of sequence n.
        state: [S, HV, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the token of sequence n. No other slot of either pool is written.
        activation: of the convolution, "none" or "silu".
        scale: factor on q, usually ``K ** -0.5``.
        norm_eps: added to the mean square of o.
        records: [S, D, R] a row ``[qkv | b | a]`` of inputs for each draft, in qkv's dtype, where
            the step verifies drafts; else None. **Mutated**: slot ``state_indices[n]`` receives
            those of the second token on.
    """

    recorded: ClassVar[tuple[str, ...]] = ("qkv", "b", "a")
    read: ClassVar[tuple[str, ...]] = ("z",)
    pools: ClassVar[tuple[str, ...]] = ("conv_state", "state")
    per_token: ClassVar[tuple[str, ...]] = (*recorded, *read)
    layout: ClassVar[ChunkLayout] = CORRECTED

    qkv: Annotated[Tensor, Rows("C")]
    z: Annotated[Tensor, Rows("HV * V")]
    b: Annotated[Tensor, Rows("HV", counts=False)]
    a: Annotated[Tensor, Rows("HV", counts=False)]
    conv_weight: Annotated[Tensor, Dense("C", "W")]
    conv_bias: Annotated[Tensor | None, Dense("C")]
    A_log: Annotated[Tensor, Dense("HV", or_float32=True, counts=False)]
    dt_bias: Annotated[Tensor, Dense("HV", or_float32=True, counts=False)]
    norm_weight: Annotated[Tensor, Dense("V", or_float32=True, counts=False)]
    conv_state: Annotated[Tensor, Pool("W - 1", "C", counts=False)]
    state: Annotated[Tensor, Pool("HV", "V", "K", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    activation: str = field(kw_only=True)
    scale: float = field(kw_only=True)
    records: Annotated[Tensor | None, Pool("D_", "C + 2 * HV")] = field(default=None, kw_only=True)

    @property
    def widths(self) -> list[int]:
        """Channels of q, of k and of v."""
        v_size = self.state.shape[1] * self.state.shape[2]
        k_size = (self.qkv.shape[1] - v_size) // 2
        return [k_size, k_size, v_size]

    @property
    def num_k_heads(self) -> int:
        """Heads of q and k, each of which heads of v share."""
        return self.widths[0] // self.state.shape[3]

    def check_form(self) -> None:
        """Raise ValueError for filters that no kernel is made for, and unless q and k take what v
        leaves of the channels."""
        self.check_ndims(qkv=2, state=4, conv_weight=2)
        check_width(self.conv_weight)
        self.check_heads()

    def check_heads(self) -> None:
        """Raise ValueError unless q and k are whole heads, which divide those of v."""
        channels = self.qkv.shape[1]
        _, num_v_heads, v_dim, k_dim = self.state.shape
        of_keys = channels - num_v_heads * v_dim
        num_k_heads = of_keys // (2 * k_dim)
        if num_k_heads < 1 or of_keys % (2 * k_dim) or num_v_heads % num_k_heads:
            raise ValueError(
                f"qkv must have 2 H {k_dim} + {num_v_heads * v_dim} channels, where H divides the "
                f"{num_v_heads} heads of state, got {channels}"
            )

    def check(self) -> None:
        """Raise ValueError for an unknown activation, and records or a chunk that do not fit."""
        OpenStep.check(self)
        check_activation(self.activation)


CPP_SIZES = "C=channels W=width HV=num_v_heads V=v_dim K=k_dim"
CPP_VALUES = {
    "silu": "x.activation == 'silu'",
    "wide_norm": "x.norm_weight.dtype is float32",
    "num_records": "0 if x.records is None else x.records.shape[1]",
    "record_width": "0 if x.records is None else x.records.shape[2]",
}
