"""How the weights of matrix products are stored: in the dtype of what they meet, or smaller with
scales. Their dtype says which, and what their scales are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import NO_FEATURES
from torch_hybrid.ops.formats import block_scales, integers

# In the order in which C++ counts them (native/rows.h), after those without scales.
WITH_SCALES = (block_scales.DTYPE, integers.INT8, integers.INT4)
_FEATURES = {block_scales.DTYPE: block_scales.FEATURE, **integers.FEATURES}
FEATURES = frozenset(_FEATURES.values())


def name_of(dtype: torch.dtype) -> str:
    """What weights of a dtype with scales are called: "fp8", "int8" or "int4"."""
    return _FEATURES[dtype].removesuffix("_weights")


def features_of(dtype: torch.dtype) -> frozenset[str]:
    """What weights of a dtype need of an implementation."""
    return frozenset({_FEATURES[dtype]}) if dtype in _FEATURES else NO_FEATURES


def format_of(dtype: torch.dtype) -> int:
    """The number of a dtype of weights in C++."""
    return 1 + WITH_SCALES.index(dtype) if dtype in WITH_SCALES else 0


def are_integers(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype are integers of 8 or 4 bits."""
    return dtype in (integers.INT8, integers.INT4)


def depth_of(weight: Tensor) -> int:
    """Numbers of a row."""
    return integers.depth_of(weight)


def group_of(weight: Tensor, scales: Tensor) -> int:
    """How many numbers of a row share a scale; 0 where that is not what scales are for."""
    return 0 if weight.dtype == block_scales.DTYPE else integers.group_of(weight, scales)


def has_zeros(weight: Tensor, scales: Tensor) -> bool:
    """Whether each scale has a zero point beside it."""
    return integers.has_zeros(weight, scales)


def check_has_scales(name: str, weight: Tensor) -> None:
    """Raise ValueError unless a weight is one of those that have scales."""
    if weight.dtype not in WITH_SCALES:
        raise ValueError(
            f"{name} must be 8-bit floats or integers to have scales, got {weight.dtype}"
        )


def stored_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of the tensor that holds a weight of this shape."""
    *leading, depth = shape
    return (*leading, depth // 2) if dtype == integers.INT4 else shape


def check_scales(weight: Tensor, scales: Tensor, name: str, *, num_parts: int = 1) -> None:
    """Raise ValueError, about ``name``, unless scales are those of such a weight."""
    if weight.dtype == block_scales.DTYPE:
        block_scales.check_scales(weight, scales, name, num_parts=num_parts)
    else:
        integers.check_scales(weight, scales, name)


def dequantized(
    weight: Tensor, scales: Tensor, dtype: torch.dtype, *, num_parts: int = 1
) -> Tensor:
    """What a weight is worth, computed in float32 or better and rounded to ``dtype``.

    Rows of 8-bit floats are in ``num_parts`` parts that have blocks of scales each for itself.
    """
    if weight.dtype == block_scales.DTYPE:
        return block_scales.dequantized(weight, scales, dtype, num_parts=num_parts)
    return integers.dequantized(weight, scales, dtype)
