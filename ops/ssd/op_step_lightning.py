"""One token of each sequence through a lightning-attention mixer, between its projections.

The norms and the rotation of q and k, the recurrence, the gate and the norm of a decode step in one
op: each by itself takes little, and costs as much again to be called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_activation
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, Rows, define, made
from torch_hybrid.ops.open_chunk import ADDED, ChunkLayout, OpenStep
from torch_hybrid.ops.step_implementations import step_implementations

IMPLEMENTATIONS = step_implementations(
    "lightning_step",
    "ssd",
    "lightning",
    limits={"head_k_dim": 512},
    composed="torch_hybrid.ops.ssd._composed:lightning",
    opens_chunks=True,
)


@dataclass(slots=True, repr=False, eq=False)
class LightningStep(OpenStep):
    """Step of a mixer: norm and rotate q and k, advance the states by one token, and norm and gate
    what is read from them; or verify drafts.

        q, k, v = act(qkv), rounded to the dtype
        q, k = norm_weight q / rms(q), ...                 of each head, where there are weights
        q, k = rotated by the token's angles               NeoX's halves, where there are angles
        S = exp(-slope) S + v k^T
        o = scale S q                  rounded to the dtype where q and k are not normed
        out = norm_weight o / rms(o) sigmoid(gate)         rms of each group of channels

    It is what a layer computes before ``ssd``, that op, and what comes after it, with the
    same roundings between them; all arithmetic is float32.

    Args:
        qkv: [T, 3 H D] queries, keys and values, a row for each token; H and D are those of
            ``state``. Float dtype; rows may lie any distance apart (a slice of a projection), one
            row is contiguous; so for gate, cos and sin.
        gate: [T, H D] of the output, before its sigmoid, in qkv's dtype, or None: o is returned.
        q_norm_weight, k_norm_weight: [D] in qkv's dtype or in float32, or both None.
        cos, sin: [T, R / 2] float32, of which the first R channels of a head are rotated, or both
            None.
        slopes: [H] float32, minus the log decay of a token in each head.
        norm_weight: [H D] in qkv's dtype or in float32; None where gate is None.
        state: [S, H, D, D] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the token of sequence n; no other slot is written.
        activation: of q, k and v, "none" or "silu".
        scale: factor on q.
        norm_groups: equal parts of a token's H D channels, each normed by itself.
        norm_eps: added to the mean square of a head of q and k, and of a group.
        records: [S, M, 2 H D] float32 a row ``[k | v]`` of each draft, as the recurrence takes
            them, where the step verifies drafts; else None. **Mutated**: slot
            ``state_indices[n]`` receives those of the second token on.

    Returns:
        [T, H D] in qkv's dtype, without a gate in float32; rows of padding tokens are exactly 0.

    The mixer of MiniMax-01 (arXiv 2501.08313) and of Ring-2.5, in decode.
    """

    per_token: ClassVar[tuple[str, ...]] = ("qkv", "gate", "cos", "sin")
    layout: ClassVar[ChunkLayout] = ADDED

    qkv: Annotated[Tensor, Rows("3 * H * D")]
    gate: Annotated[Tensor | None, Rows("H * D")]
    q_norm_weight: Annotated[Tensor | None, Dense("D", or_float32=True, counts=False)]
    k_norm_weight: Annotated[Tensor | None, Dense("D", or_float32=True, counts=False)]
    cos: Annotated[Tensor | None, Rows("R", dtype=torch.float32)]
    sin: Annotated[Tensor | None, Rows("R", dtype=torch.float32)]
    slopes: Annotated[Tensor, Dense("H", dtype=torch.float32, counts=False)]
    norm_weight: Annotated[Tensor | None, Dense("H * D", or_float32=True)]
    state: Annotated[Tensor, Pool("H", "D", "D", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    activation: str = field(kw_only=True)
    scale: float = field(kw_only=True)
    norm_groups: int = field(kw_only=True)
    norm_eps: float = field(kw_only=True)
    records: Annotated[Tensor | None, Pool("M", "2 * H * D", dtype=torch.float32)] = field(
        default=None, kw_only=True
    )

    @property
    def width(self) -> int:
        """Channels of q, of k and of v."""
        return self.state.shape[1] * self.state.shape[2]

    @property
    def num_k_heads(self) -> int:
        """Heads, each of which has keys of its own."""
        return self.state.shape[1]

    @property
    def half(self) -> int:
        """Number of a token's angles, half of the channels that are rotated."""
        return 0 if self.cos is None else self.cos.shape[-1]

    def check_form(self) -> None:
        """Raise ValueError for one of two tensors that go together, and for too many angles."""
        self.check_ndims(qkv=2, state=4)
        for names in (("q_norm_weight", "k_norm_weight"), ("cos", "sin"), ("gate", "norm_weight")):
            if len({getattr(self, name) is None for name in names}) > 1:
                raise ValueError(f"{' and '.join(names)} must both be given, or both be None")
        dim = self.state.shape[2]
        if 2 * self.half > dim:
            raise ValueError(f"cos must have at most {dim // 2} columns, got {self.half}")

    def check(self) -> None:
        """Raise ValueError for an unknown activation, for groups that do not divide the channels,
        and for records or a chunk that do not fit."""
        OpenStep.check(self)
        check_activation(self.activation)
        if self.norm_groups < 1 or self.width % self.norm_groups:
            raise ValueError(
                f"norm_groups must divide the {self.width} channels of o, got {self.norm_groups}"
            )


def empty_outputs(x: LightningStep) -> Tensor:
    """Make the outputs of all heads: in float32, where nothing gates them."""
    dtype = torch.float32 if x.gate is None else x.qkv.dtype
    return x.qkv.new_empty(x.qkv.shape[0], x.width, dtype=dtype)


lightning_step = define(
    LightningStep,
    IMPLEMENTATIONS,
    returns=made(empty_outputs),
    limited={"head_k_dim": "D"},
    flops="4 * T * H * D * D",
    cpp=Cpp(
        "H=num_v_heads D=v_dim D=k_dim",
        {
            "silu": "x.activation == 'silu'",
            "wide_q_norm": "x.q_norm_weight is not None and x.q_norm_weight.dtype is float32",
            "wide_k_norm": "x.k_norm_weight is not None and x.k_norm_weight.dtype is float32",
            "wide_norm": "x.norm_weight is not None and x.norm_weight.dtype is float32",
            "num_records": "0 if x.records is None else x.records.shape[1]",
        },
    ),
)
