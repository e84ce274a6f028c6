"""Formats of the weights of matrix products: the dtype of x, or FP8, INT8, INT4 or FP4 with scales.

A weight's dtype says which, and what its scales are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import NO_FEATURES
from torch_hybrid.ops.formats import block_scales, integers

# In the order in which C++ counts them (native/rows.h), after those without scales.
WITH_SCALES = (block_scales.DTYPE, integers.INT8, integers.INT4, integers.FP4)
_FEATURES = {block_scales.DTYPE: block_scales.FEATURE, **integers.FEATURES}
FEATURES = frozenset(_FEATURES.values())


def name_of(dtype: torch.dtype) -> str:
    """Name the format of weights of a dtype with scales: "fp8", "int8", "int4" or "fp4"."""
    return _FEATURES[dtype].removesuffix("_weights")


def features_of(dtype: torch.dtype) -> frozenset[str]:
    """List the features that weights of a dtype ask of an implementation."""
    return frozenset({_FEATURES[dtype]}) if dtype in _FEATURES else NO_FEATURES


def format_of(dtype: torch.dtype) -> int:
    """Number a dtype of weights as C++ does."""
    return 1 + WITH_SCALES.index(dtype) if dtype in WITH_SCALES else 0


def are_integers(dtype: torch.dtype) -> bool:
    """Tell whether the kernels of integers read weights of a dtype: INT8, INT4 or FP4."""
    return dtype in integers.FEATURES


def depth_of(weight: Tensor) -> int:
    """Count the numbers of a row."""
    return integers.depth_of(weight)


def group_of(weight: Tensor, scales: Tensor) -> int:
    """Count the numbers of a row that share a scale; 0 for FP8, whose scales are of blocks."""
    return 0 if weight.dtype == block_scales.DTYPE else integers.group_of(weight, scales)


def has_zeros(weight: Tensor, scales: Tensor) -> bool:
    """Tell whether each scale has a zero point beside it."""
    return integers.has_zeros(weight, scales)


def check_has_scales(name: str, weight: Tensor) -> None:
    """Raise ValueError unless a weight's format has scales."""
    if weight.dtype not in WITH_SCALES:
        raise ValueError(
            f"{name} must be 8-bit floats or integers to have scales, got {weight.dtype}"
        )


def stored_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Find the shape of the tensor that holds a weight of this shape."""
    *leading, depth = shape
    return (*leading, integers.stored_depth(depth, dtype))


def check_scales(weight: Tensor, scales: Tensor, name: str, *, num_parts: int = 1) -> None:
    """Raise ValueError, about ``name``, unless scales fit the format and shape of a weight."""
    if weight.dtype == block_scales.DTYPE:
        block_scales.check_scales(weight, scales, name, num_parts=num_parts)
    else:
        integers.check_scales(weight, scales, name)


def check_alike(name: str, scaled: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Raise ValueError, about ``name``, where MXFP4 stands beside NVFP4: C++ takes one of them."""
    groups = {group_of(*pair) for pair in scaled if pair[0].dtype == integers.FP4}
    if len(groups) > 1:
        raise ValueError(f"{name} must be of MXFP4 or of NVFP4, got both")


def dequantized(
    weight: Tensor, scales: Tensor, dtype: torch.dtype, *, num_parts: int = 1
) -> Tensor:
    """Dequantize a weight in float32 or better, and round to ``dtype``.

    Rows of FP8 are in ``num_parts`` parts that have blocks of scales each for itself.
    """
    if weight.dtype == block_scales.DTYPE:
        return block_scales.dequantized(weight, scales, dtype, num_parts=num_parts)
    return integers.dequantized(weight, scales, dtype)
