"""The experts of a mixture: each token through its own few MLPs, in one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import NO_FEATURES
from torch_hybrid.ops.core.declare import Dense, Op, Rows, define, like
from torch_hybrid.ops.core.registration import check_dtypes, check_shapes
from torch_hybrid.ops.formats import block_scales, stored_weights
from torch_hybrid.ops.implementations import in_cpp, in_torch, in_triton, invariant
from torch_hybrid.ops.triton.devices import fp8_products_missing

# Whether a gate stands beside the up projection, by activation.
HAS_GATE = {"silu": True, "relu2": False}
FEATURES = frozenset({block_scales.FEATURE})
_SCALES = (torch.float32, torch.uint8)

_PACKAGE = "torch_hybrid.ops.fused_experts"
_CPP = in_cpp(
    f"{_PACKAGE}._cpu:fused_experts",
    features=stored_weights.FEATURES,
    figures="torch_hybrid.ops.native.cpu_tuning:figures",
)
_TRITON = in_triton(f"{_PACKAGE}._triton:fused_experts", features=stored_weights.FEATURES)
IMPLEMENTATIONS = {
    "cpp": _CPP,
    "cpp_invariant": invariant(_CPP),
    "triton_fp8": in_triton(
        f"{_PACKAGE}._triton:rounded_experts",
        features=FEATURES,
        only_with=FEATURES,
        available=fp8_products_missing,
    ),
    "triton": _TRITON,
    "triton_invariant": invariant(_TRITON),
    "torch": in_torch(f"{_PACKAGE}._torch:fused_experts", features=stored_weights.FEATURES),
}


@dataclass(slots=True, repr=False, eq=False)
class FusedExperts(Op):
    """Weighted sum of each token's chosen experts.

    ``out[t] = sum_j expert_weights[t, j] * down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t]))``
    with ``e = expert_ids[t, j]``, or ``down[e] @ act(up[e] @ x[t])`` where the activation has no
    gate. Sums are float32.

    With scales, weights are FP8, INT8, INT4 or FP4, and dequantized as ``linear`` does it. Only the
    implementation "triton_fp8" rounds anything else, where there are more than four tokens: tokens
    and hidden activations, to FP8 with a scale for each row and 128 columns.

    Args:
        x: [T, D] float; rows may lie any distance apart, one row is contiguous.
        expert_ids: [T, k] int32 or int64, contiguous, from 0 to E; E means no expert.
        expert_weights: [T, k] float32 or x's dtype, contiguous.
        gate_up: [E, 2 I, D] contiguous, in x's dtype: the I rows of gate, then those of up;
            [E, I, D], the rows of up alone, where there is no gate. With scales float8_e4m3fn,
            int8, uint8 with half as many columns, or int32 with an eighth.
        down: [E, D, I] contiguous, in gate_up's dtype.
        gate_up_scales: [E, 2 ceil(I / 128), ceil(D / 128)] float32, contiguous, or half of it
            without a gate: gate and up have blocks each for itself; of int8 [E, 2 I], of uint8
            [E, 2 I, D / group], or twice as many with zero points; of int32 uint8, [E, 2 I, D / 32]
            or [E, 2 I, D / 16 + 4]; or None.
        down_scales: [E, ceil(D / 128), ceil(I / 128)], [E, D], [E, D, I / group] or
            [E, D, I / group, 2] float32, contiguous, where gate_up has scales; else None. Of int32
            uint8, as those of gate_up.
        activation: "silu", of a gate; or "relu2", the square of the positive part, without one.
        limit: positive, or None. Before the activation, clamps gates to at most ``limit``, and up
            to ``-limit`` through ``limit``. Needs a gate.
        softcaps: two positive numbers instead of a limit, or None. With the first, ``act`` is
            ``c * tanh(gate / c) * sigmoid(gate)``; with the second, up becomes
            ``c * tanh(up / c)``. Needs a gate.

    Returns:
        [T, D] in x's dtype. A row depends on its own token alone.

    The experts of Qwen3-Next, Qwen3.5-MoE and Granite-4-H ("silu"), of GLM-5.3 (with a limit), of
    Inkling-2 (with softcaps) and of Nemotron-H ("relu2"), in transformers' packed layout.
    """

    x: Annotated[Tensor, Rows("D")]
    expert_ids: Annotated[Tensor, Dense("T", "k", dtype=(torch.int32, torch.int64))]
    expert_weights: Annotated[Tensor, Dense("T", "k", or_float32=True)]
    gate_up: Annotated[Tensor, Dense("...", dtype="any")]
    down: Annotated[Tensor, Dense("E", "D", "stored_width", dtype="any")]
    gate_up_scales: Annotated[Tensor | None, Dense("...", dtype=_SCALES)] = field(
        default=None, kw_only=True
    )
    down_scales: Annotated[Tensor | None, Dense("...", dtype=_SCALES)] = field(
        default=None, kw_only=True
    )
    activation: str = field(kw_only=True)
    limit: float | None = field(default=None, kw_only=True)
    softcaps: Sequence[float] | None = field(default=None, kw_only=True)

    def features(self) -> frozenset[str]:
        """List what the format of weights with scales asks of an implementation."""
        return stored_weights.features_of(self.gate_up.dtype) if self.has_scales else NO_FEATURES

    def check(self) -> None:
        """Raise ValueError for an unknown activation, its bounds, or weights that do not fit it."""
        if self.activation not in HAS_GATE:
            raise ValueError(f"activation must be one of {list(HAS_GATE)}, got {self.activation!r}")
        self._check_bounds()
        if self.has_scales:
            stored_weights.check_has_scales("gate_up", self.gate_up)
        dtype = self.gate_up.dtype if self.has_scales else self.x.dtype
        shape = self.num_experts, self.num_parts * self.width, self.dim
        stored = stored_weights.stored_shape(shape, dtype)
        check_shapes({"gate_up": (self.gate_up, stored)})
        check_dtypes({"gate_up": (self.gate_up, dtype), "down": (self.down, dtype)})
        if self.has_scales:
            self._check_scales()

    def _check_bounds(self) -> None:
        """Raise ValueError unless a limit or softcaps are positive, and bound a gate."""
        limit, softcaps = self.limit, self.softcaps
        if limit is not None and not (limit > 0 and self.has_gate):
            got = f"{limit} and {self.activation!r}"
            raise ValueError(f"limit must be positive and of a gate, got {got}")
        if softcaps is None:
            return
        if len(softcaps) != 2 or min(softcaps) <= 0:
            raise ValueError(f"softcaps must be two positive numbers, got {list(softcaps)}")
        if not self.has_gate or limit is not None:
            raise ValueError(f"softcaps must be of a gate without a limit, got limit {limit}")

    def _check_scales(self) -> None:
        """Raise ValueError unless both weights have scales, of their formats."""
        parts = {"gate_up": self.num_parts, "down": 1}
        given = (self.gate_up, self.gate_up_scales), (self.down, self.down_scales)
        for name, (_, scales) in zip(parts, given, strict=True):
            if scales is None:
                needed = f"{name}_scales must be given where the other scales are"
                raise ValueError(f"{needed}, got None")
        scaled = []
        for (name, num_parts), (weight, scales) in zip(parts.items(), given, strict=True):
            assert scales is not None
            stored_weights.check_scales(weight, scales, f"{name}_scales", num_parts=num_parts)
            scaled.append((weight, scales))
        stored_weights.check_alike("gate_up_scales and down_scales", scaled)

    def check_indices(self) -> None:
        """Raise ValueError unless each id is an expert's, or their number, which means none."""
        wrong = (self.expert_ids < 0) | (self.expert_ids > self.num_experts)
        if bool(wrong.any()):
            got = int(self.expert_ids[wrong][0])
            raise ValueError(f"expert_ids must be in [0, {self.num_experts}], got {got}")

    @property
    def has_gate(self) -> bool:
        """Flag of an activation that multiplies up by a gate."""
        return HAS_GATE[self.activation]

    @property
    def has_scales(self) -> bool:
        """Flag of weights with scales."""
        return self.gate_up_scales is not None or self.down_scales is not None

    @property
    def num_parts(self) -> int:
        """Parts of ``gate_up``: gate and up, or up alone."""
        return 1 + self.has_gate

    @property
    def num_experts(self) -> int:
        """Number of experts, E."""
        return self.down.shape[0]

    @property
    def top_k(self) -> int:
        """Number of experts that a token chooses, k."""
        return self.expert_ids.shape[1]

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a token and an expert, T k."""
        return self.expert_ids.numel()

    @property
    def dim(self) -> int:
        """Columns of a token, D."""
        return self.down.shape[1]

    @property
    def width(self) -> int:
        """Hidden activations of an expert, I."""
        return stored_weights.depth_of(self.down)


fused_experts = define(
    FusedExperts,
    IMPLEMENTATIONS,
    returns=like("x"),
    floats=frozenset(),
    flops="2 * T * k * (x.num_parts + 1) * x.width * D",
)
