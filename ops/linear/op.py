"""Linear layers that read one input, as one op: for the few rows of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, NO_FEATURES, Need
from torch_hybrid.ops.core.declare import Op, Rows, define, made
from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes
from torch_hybrid.ops.formats import block_scales, stored_weights
from torch_hybrid.ops.implementations import in_cpp, in_torch, in_triton, invariant
from torch_hybrid.ops.linear.by_torch import empty_columns
from torch_hybrid.ops.triton.devices import fp8_products_missing

FEATURES = frozenset({block_scales.FEATURE})
# Beside weights with scales, some of x's own dtype.
MIXED = "mixed_weights"

_PACKAGE = "torch_hybrid.ops.linear"
_CPP = in_cpp(
    f"{_PACKAGE}._cpu:linear",
    features=stored_weights.FEATURES,
    checks_indices=False,
    figures="torch_hybrid.ops.native.cpu_tuning:figures",
)
_TRITON = in_triton(f"{_PACKAGE}._triton:linear", features=stored_weights.FEATURES)
IMPLEMENTATIONS = {
    "cpp": _CPP,
    "cpp_invariant": invariant(_CPP),
    "triton_fp8": in_triton(
        f"{_PACKAGE}._triton_fp8:rounded_linear",
        features=FEATURES | {MIXED},
        only_with=FEATURES,
        available=fp8_products_missing,
    ),
    "triton": _TRITON,
    "triton_invariant": invariant(_TRITON),
    "torch": in_torch(
        f"{_PACKAGE}._torch:linear",
        dtypes=FLOATS_AND_FLOAT64,
        features=stored_weights.FEATURES | {MIXED},
        cuda_graph=True,
    ),
}

_NATIVE = ("cpp", "cpp_invariant", "triton", "triton_invariant")  # made for few rows


def native_impl(need: Need) -> str | None:
    """Name the implementation for few rows that can serve ``need``, if there is one."""
    able = (name for name in _NATIVE if not IMPLEMENTATIONS[name].capability.why_not(need))
    return next(able, None)


def takes_mixed(impl: str, features: frozenset[str]) -> bool:
    """Tell whether an implementation for few rows takes weights of these features beside others."""
    return impl != "torch" and not IMPLEMENTATIONS[impl].capability.features_refused(
        features | {MIXED}
    )


@dataclass(slots=True, repr=False, eq=False)
class Linear(Op):
    """Product of one input and several weight matrices, the results side by side.

    ``out[:, first : first + N_i] = x @ weights[i].T + biases[i]``. Sums are float32, of
    float64 tensors float64.

    With ``scales``, a weight is dequantized: its numbers times these. Weights that have scales come
    first, and share one of four dtypes. Where an implementation takes both ("mixed_weights"),
    weights of x's dtype may follow.

    - FP8 (float8_e4m3fn), ``weights[i][n, k] * scales[i][n // 128, k // 128]``, as in checkpoints
      with ``quant_method: fp8``;
    - INT8 (int8), ``weights[i][n, k] * scales[i][n]``;
    - INT4 (two numbers in a uint8), ``(number[n, k] - 8) * scales[i][n, k // group]``, where the
      group is 32, 64 or 128. Number ``2 k`` is the low half of ``weights[i][n, k]``, ``2 k + 1``
      the high half. With zero points beside scales, a number is worth
      ``(number[n, k] - scales[i][n, k // group, 1]) * scales[i][n, k // group, 0]``;
    - FP4 (eight numbers of E2M1 in an int32), with bytes of scales as ``formats/integers.py`` says:
      MXFP4, or NVFP4. All weights of a call have the same.

    Only the implementation "triton_fp8" rounds x, as those checkpoints are meant to be run: to FP8,
    where x meets FP8 weights, with a scale for each row and 128 columns.

    Args:
        x: [M, K] float; rows may lie any distance apart, one row is contiguous.
        weights: each [N_i, K], contiguous, in x's dtype; at least one. With ``scales``
            float8_e4m3fn, int8, uint8 [N_i, K / 2], or int32 [N_i, K / 8].
        biases: as many, each [N_i] in x's dtype, or None.
        scales: of the first weights, at least one, or None. Float32, contiguous, each
            [ceil(N_i / 128), ceil(K / 128)], [N_i], [N_i, K / group] or [N_i, K / group, 2]. Of FP4
            uint8, [N_i, K / 32] or [N_i, K / 16 + 4].

    Returns:
        [M, sum of N_i] in x's dtype, whose rows may lie apart. A row depends on its own row of x
        alone.
    """

    x: Annotated[Tensor, Rows("K")]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    scales: Sequence[Tensor] | None = field(default=None, kw_only=True)

    def features(self) -> frozenset[str]:
        """List what the weights' formats ask of an implementation."""
        if self.scales is None:
            return NO_FEATURES
        features = stored_weights.features_of(self.weights[0].dtype)
        return features | {MIXED} if len(self.scales) < len(self.weights) else features

    def check(self) -> None:
        """Raise ValueError unless there are weights, and biases and scales are theirs."""
        count = len(self.weights)
        if not count:
            raise ValueError("weights must have at least one tensor, got none")
        if len(self.biases) != count:
            raise ValueError(f"biases must have length {count}, got {len(self.biases)}")
        if self.scales is not None:
            stored_weights.check_has_scales("weights[0]", self.weights[0])
            if not 1 <= len(self.scales) <= count:
                raise ValueError(f"scales must have length 1 to {count}, got {len(self.scales)}")
        for i in range(count):
            self._check_weight(i)
        stored_weights.check_alike("scales", self.scaled)

    def _check_weight(self, i: int) -> None:
        """Raise ValueError unless weight i, its bias and its scales are of right forms."""
        weight, bias = self.weights[i], self.biases[i]
        has_scales = self.scales is not None and i < len(self.scales)
        dtype = self.weights[0].dtype if has_scales else self.x.dtype
        size = weight.shape[0]
        shape = stored_weights.stored_shape((size, self.x.shape[1]), dtype)
        is_right = weight.shape == shape and weight.dtype == dtype and weight.is_contiguous()
        if not is_right or bias is not None:  # names are written where they may be needed
            check_shapes({f"weights[{i}]": (weight, shape), f"biases[{i}]": (bias, (size,))})
            check_dtypes({f"weights[{i}]": (weight, dtype), f"biases[{i}]": (bias, self.x.dtype)})
            check_contiguous(**{f"weights[{i}]": weight, f"biases[{i}]": bias})
        if self.scales is not None and has_scales:
            stored_weights.check_scales(weight, self.scales[i], f"scales[{i}]")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns of each weight's result."""
        return tuple([weight.shape[0] for weight in self.weights])

    @property
    def scaled(self) -> list[tuple[Tensor, Tensor]]:
        """Weights that have scales, with these."""
        return list(zip(self.weights, self.scales or (), strict=False))

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        if self.impl == "triton":
            return empty_columns(self.x, self.sizes)
        return self.x.new_empty(self.x.shape[0], sum(self.sizes))


linear = define(
    Linear,
    IMPLEMENTATIONS,
    returns=made(Linear.empty),
    floats=frozenset(),
    flops="2 * T * K * sum(x.sizes)",
)
