"""Keys, values and latents of 8 bits in a cache: each worth its number times its head's scale.

Numbers are float8_e4m3fn: three bits of fraction over eighteen powers of two, so that a scale keeps
values within reach and does not make them more exact. Rounding happens once, when a row is written:
whoever attends, in the same step or later, attends to what the cache holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
# What a caller needs of an implementation that keeps such rows.
FEATURE = "fp8_kv"


def rounded(values: Tensor, scales: Tensor | float) -> Tensor:
    """Values as a cache holds them: divided in float32, to the nearest number, ties to even.

    What is larger than the largest number becomes that; NaN stays.
    """
    numbers: Tensor = (values.float() / scales).clamp(-LARGEST, LARGEST).to(DTYPE)
    return numbers


def worth(numbers: Tensor, scales: Tensor | float, dtype: torch.dtype) -> Tensor:
    """What kept numbers are worth, in ``dtype``; computed in float32 or better."""
    wide = numbers.to(torch.promote_types(dtype, torch.float32))
    return (wide * scales).to(dtype)


def features_of(kept: torch.dtype | None) -> frozenset[str]:
    """What an implementation must have for a pool of this dtype, beside the ordinary."""
    return frozenset({FEATURE}) if kept == DTYPE else frozenset()


def check_scales(name: str, pool: Tensor, scales: Tensor | None, *shape: int) -> None:
    """Raise ValueError unless ``scales``, called ``name``, are there for a pool of 8 bits, and for
    no other."""
    if (scales is None) == (pool.dtype == DTYPE):
        wanted = "must be given" if scales is None else "must be None"
        raise ValueError(f"{name} {wanted} for a pool of {pool.dtype}")
    if scales is not None:
        check_shapes({name: (scales, shape)})
        check_dtypes({name: (scales, torch.float32)})
        check_contiguous(**{name: scales})


def check_pool_dtype(name: str, pool: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless a pool is of the dtype of what is written to it, or of 8 bits."""
    if pool.dtype != DTYPE:
        check_dtypes({name: (pool, dtype)})


def check_pairs(pool: Tensor, **widths: int) -> None:
    """Raise ValueError where rows of 8 bits have parts that cannot be read two by two."""
    for name, width in widths.items():
        if pool.dtype == DTYPE and width % 2:
            raise ValueError(f"{name} must be even for a pool of {pool.dtype}, got {width}")


def given_scales(name: str, scales: Tensor | None) -> Mapping[str, Tensor]:
    """The argument ``name`` of an op, left out where there is none."""
    return {} if scales is None else {name: scales}
