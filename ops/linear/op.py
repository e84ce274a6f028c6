"""Linear layers that read one input, as one op: for the few rows of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS_AND_FLOAT64,
    NO_FEATURES,
    Capability,
    Implementation,
    Need,
)
from torch_hybrid.ops.core.registration import check_impl, check_shapes, define_op
from torch_hybrid.ops.formats import block_scales, stored_weights
from torch_hybrid.ops.linear.by_torch import empty_columns
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import (
    fp8_products_missing,
    triton_devices,
    triton_missing,
)

FEATURES = frozenset({block_scales.FEATURE})
# Beside weights with scales, some of x's own dtype.
MIXED = "mixed_weights"

IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            features=stored_weights.FEATURES,
            available=compiler_missing,
        ),
        launcher="torch_hybrid.ops.linear._cpu:linear",
        figures="torch_hybrid.ops.native.cpu_tuning:figures",
    ),
    "cpp_invariant": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            features=stored_weights.FEATURES | {BATCH_INVARIANT},
            available=compiler_missing,
        ),
        launcher="torch_hybrid.ops.linear._cpu_invariant:linear",
    ),
    "triton_fp8": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=FEATURES | {MIXED},
            only_with=FEATURES,
            cuda_graph=True,
            available=fp8_products_missing,
        ),
        launcher="torch_hybrid.ops.linear._triton_fp8:rounded_linear",
    ),
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=stored_weights.FEATURES,
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.linear._triton:linear",
    ),
    "triton_invariant": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=frozenset({BATCH_INVARIANT}),
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.linear._triton:invariant_linear",
    ),
    "torch": Implementation(
        capability=Capability(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=FLOATS_AND_FLOAT64,
            features=stored_weights.FEATURES | {MIXED},
            cuda_graph=True,
        ),
        launcher="torch_hybrid.ops.linear._torch:linear",
    ),
}

_NATIVE = ("cpp", "cpp_invariant", "triton", "triton_invariant")  # made for few rows


def native_impl(need: Need) -> str | None:
    """The implementation for few rows that can serve ``need``, if there is one."""
    able = (name for name in _NATIVE if not IMPLEMENTATIONS[name].capability.why_not(need))
    return next(able, None)


def takes_mixed(impl: str, features: frozenset[str]) -> bool:
    """Whether an implementation for few rows takes weights of these features beside others."""
    return impl != "torch" and not IMPLEMENTATIONS[impl].capability.features_refused(
        features | {MIXED}
    )


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scales: Sequence[Tensor] | None = None,
    impl: str,
) -> Tensor:
    """Multiply one input by several weight matrices, the results side by side.

    ``out[:, first : first + N_i] = x @ weights[i].T + biases[i]``. Sums are float32, of
    float64 tensors float64.

    With ``scales``, a weight is worth its numbers times these. Weights that have scales come first,
    and are of one dtype, which is one of these; any others, where an implementation takes both
    ("mixed_weights"), are of x's:

    - float8_e4m3fn, ``weights[i][n, k] * scales[i][n // 128, k // 128]``, as in checkpoints with
      ``quant_method: fp8``;
    - int8, ``weights[i][n, k] * scales[i][n]``;
    - uint8, of two numbers of 4 bits each: ``(number[n, k] - 8) * scales[i][n, k // group]``,
      where number ``2 k`` is the low half of ``weights[i][n, k]`` and ``2 k + 1`` the high half,
      and group is 32, 64 or 128; or, with zero points beside scales,
      ``(number[n, k] - scales[i][n, k // group, 1]) * scales[i][n, k // group, 0]``.

    What x holds is not rounded, but by the implementation "triton_fp8", where it meets 8-bit
    floats: to such too, each row's numbers with a scale for 128 columns, as those checkpoints are
    meant to be run.

    Args:
        x: [M, K] float; rows may lie any distance apart, one row is contiguous.
        weights: each [N_i, K], contiguous, in x's dtype; with ``scales`` float8_e4m3fn, int8, or
            uint8 [N_i, K / 2]; at least one.
        biases: as many, each [N_i] in x's dtype, or None.
        scales: of the first weights, at least one; float32, contiguous, each
            [ceil(N_i / 128), ceil(K / 128)], [N_i], [N_i, K / group] or [N_i, K / group, 2]; or
            None.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [M, sum of N_i] in x's dtype, whose rows may lie apart. A row depends on its own row of x
        alone.

    Raises:
        ValueError: a shape, dtype or layout is not as above, or ``impl`` is unknown.
    """
    features = NO_FEATURES
    if scales is not None and weights:
        stored_weights.check_has_scales("weights[0]", weights[0])
        features = stored_weights.features_of(weights[0].dtype)
        if len(scales) < len(weights):
            features |= {MIXED}
    check_impl(impl, IMPLEMENTATIONS, x.device, dtype=x.dtype, features=features)
    _check_inputs(x, weights, biases, scales)
    given = {} if scales is None else {"scales": scales}
    out: Tensor = _LINEAR(x, weights, biases, **given, impl=impl)
    return out


def _check_inputs(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor] | None,
) -> None:
    if x.ndim != 2:
        raise ValueError(f"x must have 2 dimensions, got {list(x.shape)}")
    if not weights:
        raise ValueError("weights must have at least one tensor, got none")
    if len(biases) != len(weights):
        raise ValueError(f"biases must have length {len(weights)}, got {len(biases)}")
    if scales is not None and not 1 <= len(scales) <= len(weights):
        raise ValueError(f"scales must have length 1 to {len(weights)}, got {len(scales)}")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"x must have contiguous rows, got strides {list(x.stride())}")
    num_scaled = 0 if scales is None else len(scales)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        num_rows = weight.shape[0]
        weight_dtype = weights[0].dtype if i < num_scaled else x.dtype
        stored_shape = stored_weights.stored_shape((num_rows, x.shape[1]), weight_dtype)
        check_shapes(
            {
                f"weights[{i}]": (weight, stored_shape),
                f"biases[{i}]": (bias, (num_rows,)),
            }
        )
        for name, tensor, dtype in (
            (f"weights[{i}]", weight, weight_dtype),
            (f"biases[{i}]", bias, x.dtype),
        ):
            if tensor is not None and tensor.dtype != dtype:
                raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
        if scales is not None and i < num_scaled:
            stored_weights.check_scales(weight, scales[i], f"scales[{i}]")


def _fake(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scales: Sequence[Tensor] | None = None,
    impl: str,
) -> Tensor:
    sizes = [weight.shape[0] for weight in weights]
    return empty_columns(x, sizes) if impl == "triton" else x.new_empty(x.shape[0], sum(sizes))


_LINEAR = define_op(
    "linear(Tensor x, Tensor[] weights, Tensor?[] biases, *, Tensor[]? scales=None, str impl)"
    " -> Tensor",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
