"""FP8 keys, values and latents in a cache: each is its number times its head's scale.

Numbers are float8_e4m3fn: three bits of fraction over eighteen powers of two. So a scale keeps
values within reach, and does not make them more exact. A row is rounded once, when it is written:
attention in the same step, too, reads what the cache holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
# What a caller needs of an implementation that keeps such rows.
FEATURE = "fp8_kv"


def rounded(values: Tensor, scales: Tensor | float) -> Tensor:
    """Quantize values for a cache: divide in float32, then round to nearest, ties to even.

    Values past the largest number become that; NaN stays.
    """
    numbers: Tensor = (values.float() / scales).clamp(-LARGEST, LARGEST).to(DTYPE)
    return numbers


def worth(numbers: Tensor, scales: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Dequantize cached numbers in float32 or better, and round to ``dtype``."""
    wide = numbers.to(torch.promote_types(dtype, torch.float32))
    return (wide * scales).to(dtype)


def features_of(kept: torch.dtype | None) -> frozenset[str]:
    """List the features that a pool of this dtype asks of an implementation."""
    return frozenset({FEATURE}) if kept == DTYPE else frozenset()


def check_scales(name: str, pool: Tensor, scales: Tensor | None, *shape: int) -> None:
    """Raise ValueError unless ``scales``, called ``name``, are there for an FP8 pool alone."""
    if (scales is None) == (pool.dtype == DTYPE):
        wanted = "must be given" if scales is None else "must be None"
        raise ValueError(f"{name} {wanted} for a pool of {pool.dtype}")
    if scales is not None:
        check_shapes({name: (scales, shape)})
        check_dtypes({name: (scales, torch.float32)})
        check_contiguous(**{name: scales})


def check_pool_dtype(name: str, pool: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless a pool is FP8, or of the dtype of what is written to it."""
    if pool.dtype != DTYPE:
        check_dtypes({name: (pool, dtype)})


def check_pairs(pool: Tensor, **widths: int) -> None:
    """Raise ValueError where FP8 rows have parts that cannot be read two by two."""
    for name, width in widths.items():
        if pool.dtype == DTYPE and width % 2:
            raise ValueError(f"{name} must be even for a pool of {pool.dtype}, got {width}")
