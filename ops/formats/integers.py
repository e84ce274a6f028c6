"""INT8 and INT4 weights: each is its number times a scale.

In INT8, a row has one scale. In INT4, each group of 32, 64 or 128 numbers of a row has one. Two
INT4 numbers share a byte: number 2i is the low half of byte i, 2i + 1 the high half. Each is stored
plus 8, or, where a group has a zero point beside its scale, plus that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.native.quantize import quantize

INT8, INT4 = torch.int8, torch.uint8  # in what they are stored
# What a caller needs of an implementation that takes such weights.
FEATURES = {INT8: "int8_weights", INT4: "int4_weights"}
GROUPS = (32, 64, 128)
_OFFSET = 8
_LARGEST_INT8 = 127
# By which the largest number of a group is divided: the best of them is taken. With 8 it is -8, the
# largest number there is; with more it is cut off, which the others gain from.
_DIVISORS = (7.0, 8.0, 8.75, 9.5)
_AT_ONCE = 1 << 22  # numbers, of which several floats each are held


def depth_of(weight: Tensor) -> int:
    """Count the numbers of a row."""
    return weight.shape[-1] * (2 if weight.dtype == INT4 else 1)


def group_of(weight: Tensor, scales: Tensor) -> int:
    """Count the numbers of a row that share a scale."""
    if weight.dtype == INT8:
        return weight.shape[-1]
    num_groups = scales.shape[weight.ndim - 1]
    return depth_of(weight) // num_groups if num_groups else GROUPS[0]


def has_zeros(weight: Tensor, scales: Tensor) -> bool:
    """Tell whether each scale has a zero point beside it."""
    return weight.dtype == INT4 and scales.ndim > weight.ndim


def check_scales(weight: Tensor, scales: Tensor, name: str) -> None:
    """Raise ValueError, about ``name``, unless scales are as :func:`dequantized` takes them."""
    if weight.dtype == INT8:
        check_shapes({name: (scales, weight.shape[:-1])})
    else:
        *leading, _ = weight.shape
        depth = depth_of(weight)
        shapes = [[*leading, depth // group] for group in GROUPS if depth % group == 0]
        if not shapes:
            raise ValueError(
                f"{name}: a row of {depth} numbers of 4 bits has no whole groups of 32, 64 or 128"
            )
        given = list(scales.shape)
        if given not in shapes and given not in [[*shape, 2] for shape in shapes]:
            allowed = " or ".join(map(str, shapes))
            raise ValueError(
                f"{name} must have shape {allowed}, or 2 of each with zero points, got {given}"
            )
    check_dtypes({name: (scales, torch.float32)})
    check_contiguous(**{name: scales})


def dequantized(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight in float32 or better, and round to ``dtype``.

    Args:
        weight: [..., N, K] int8, or [..., N, K / 2] uint8.
        scales: [..., N], or [..., N, K / group], or [..., N, K / group, 2] of scales and zero
            points, float32.
        dtype: of the result.
    """
    compute = torch.promote_types(dtype, torch.float32)
    if weight.dtype == INT8:
        return (weight.to(compute) * scales.to(compute)[..., None]).to(dtype)
    stored = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2).to(compute)
    num_groups = scales.shape[weight.ndim - 1]
    if num_groups == 0:
        return stored.to(dtype)
    groups, scales = stored.unflatten(-1, (num_groups, -1)), scales.to(compute)
    if scales.ndim > weight.ndim:
        scales, zeros = scales.split(1, -1)
        numbers = groups - zeros
    else:
        scales, numbers = scales[..., None], groups - _OFFSET
    worth: Tensor = (numbers * scales).flatten(-2).to(dtype)
    return worth


def in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [..., N, K] to INT8: the nearest numbers, and their scales."""
    flat = weight.flatten(0, -2)
    numbers = flat.new_empty(flat.shape, dtype=INT8)
    scales = flat.new_empty(len(flat), dtype=torch.float32)
    if weight.device.type == "cpu" and compiler_missing() is None:
        quantize(flat, numbers, scales, 0)
    else:
        _fill_8_bits(flat, numbers, scales)
    return numbers.view(weight.shape), scales.view(weight.shape[:-1])


def _fill_8_bits(flat: Tensor, numbers: Tensor, scales: Tensor) -> None:
    for rows in _stretches(flat):
        part = flat[rows].float()
        largest = part.abs().amax(-1) if part.shape[-1] else part.new_zeros(len(part))
        scales[rows] = _not_zero(largest / _LARGEST_INT8)
        numbers[rows] = (part / scales[rows, None]).round_().to(INT8)


def in_4_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize a weight [..., N, K] to INT4 in groups of ``group``: numbers, and their scales.

    Of a few scales, a group takes the one with the least sum of squared errors.
    """
    depth = weight.shape[-1]
    if group not in GROUPS:
        raise ValueError(f"group must be 32, 64 or 128, got {group}")
    if depth % group:
        raise ValueError(f"a weight of depth {depth} has no whole groups of {group}")
    flat = weight.flatten(0, -2)
    numbers = flat.new_empty((len(flat), depth // 2), dtype=INT4)
    scales = flat.new_empty((len(flat), depth // group), dtype=torch.float32)
    if weight.device.type == "cpu" and compiler_missing() is None:
        quantize(flat, numbers, scales, group)
    else:
        _fill_4_bits(flat, numbers, scales)
    leading = weight.shape[:-1]
    return numbers.view(*leading, depth // 2), scales.view(*leading, depth // group)


def _fill_4_bits(flat: Tensor, numbers: Tensor, scales: Tensor) -> None:
    num_groups = scales.shape[1]
    for rows in _stretches(flat):
        groups = flat[rows].float().unflatten(-1, (num_groups, -1))
        best = _best_scales(groups)
        stored = _nearest(groups, best).add_(_OFFSET).flatten(-2).to(INT4)
        numbers[rows] = stored[:, ::2] | stored[:, 1::2] << 4
        scales[rows] = best.squeeze(-1)


def _best_scales(groups: Tensor) -> Tensor:
    place = groups.abs().argmax(-1, keepdim=True)
    largest = -groups.gather(-1, place)  # which becomes the negative number that is the largest
    best, least = _not_zero(largest / _DIVISORS[0]), None
    for divisor in _DIVISORS:
        scales = _not_zero(largest / divisor)
        error = (_nearest(groups, scales) * scales - groups).square_().sum(-1, keepdim=True)
        if least is not None:
            scales = torch.where(error < least, scales, best)
            error = torch.minimum(error, least)
        best, least = scales, error
    return best


def _nearest(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / scales).round_().clamp_(-_OFFSET, _OFFSET - 1)


def _not_zero(scales: Tensor) -> Tensor:
    """Replace scales of groups that are all 0, where any scale will do."""
    return torch.where(scales == 0, 1.0, scales)


def _stretches(rows: Tensor) -> list[slice]:
    count = max(1, _AT_ONCE // max(1, rows.shape[-1]))
    return [slice(i, i + count) for i in range(0, len(rows), count)]
