"""INT8, INT4 and FP4 weights: each is its number times a scale.

In INT8, a row has one scale. In INT4, each group of 32, 64 or 128 numbers of a row has one. Two
INT4 numbers share a byte: number 2i is the low half of byte i, 2i + 1 the high half. Each is stored
plus 8, or, where a group has a zero point beside its scale, plus that.

FP4 is E2M1: a number of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and its sign. Eight share an int32, number
8i in the lowest bits of word i. Scales are bytes:

    MXFP4   a power of two (E8M0) for each 32 numbers
    NVFP4   FP8 (E4M3) for each 16 numbers; behind those of a row, the four bytes of a float32, by
            which all of the row is multiplied
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.native.quantize import quantize

INT8, INT4, FP4 = torch.int8, torch.uint8, torch.int32  # in what they are stored
# What a caller needs of an implementation that takes such weights.
FEATURES = {INT8: "int8_weights", INT4: "int4_weights", FP4: "fp4_weights"}
GROUPS = (32, 64, 128)
MXFP4, NVFP4 = 32, 16  # numbers of FP4 that share a scale
FACTOR_BYTES = 4  # of a row's factor, behind its scales in NVFP4
_IN_STORED = {INT8: 1, INT4: 2, FP4: 8}  # numbers in a stored one
_LARGEST_FP4, _LARGEST_E4M3 = 6.0, 448.0
_OFFSET = 8
_LARGEST_INT8 = 127
# By which the largest number of a group is divided: the best of them is taken. With 8 it is -8, the
# largest number there is; with more it is cut off, which the others gain from.
_DIVISORS = (7.0, 8.0, 8.75, 9.5)
_AT_ONCE = 1 << 22  # numbers, of which several floats each are held


def depth_of(weight: Tensor) -> int:
    """Count the numbers of a row."""
    return weight.shape[-1] * _IN_STORED.get(weight.dtype, 1)


def stored_depth(depth: int, dtype: torch.dtype) -> int:
    """Count the elements that hold the numbers of a row, the last perhaps not all of it."""
    return -(-depth // _IN_STORED.get(dtype, 1))


def num_scales(depth: int, group: int, dtype: torch.dtype) -> int:
    """Count the elements that hold the scales of a row in groups, without zero points."""
    return depth // group + (FACTOR_BYTES if dtype == FP4 and group == NVFP4 else 0)


def group_of(weight: Tensor, scales: Tensor) -> int:
    """Count the numbers of a row that share a scale."""
    if weight.dtype == INT8:
        return weight.shape[-1]
    num_groups = scales.shape[weight.ndim - 1]
    if weight.dtype == FP4:
        return NVFP4 if num_groups == num_scales(depth_of(weight), NVFP4, FP4) else MXFP4
    return depth_of(weight) // num_groups if num_groups else GROUPS[0]


def has_zeros(weight: Tensor, scales: Tensor) -> bool:
    """Tell whether each scale has a zero point beside it."""
    return weight.dtype == INT4 and scales.ndim > weight.ndim


def check_scales(weight: Tensor, scales: Tensor, name: str) -> None:
    """Raise ValueError, about ``name``, unless scales are as :func:`dequantized` takes them."""
    if weight.dtype == INT8:
        check_shapes({name: (scales, weight.shape[:-1])})
    elif weight.dtype == FP4:
        _check_fp4_scales(weight, scales, name)
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
    check_dtypes({name: (scales, torch.uint8 if weight.dtype == FP4 else torch.float32)})
    check_contiguous(**{name: scales})


def _check_fp4_scales(weight: Tensor, scales: Tensor, name: str) -> None:
    *leading, _ = weight.shape
    depth = depth_of(weight)
    if depth % MXFP4:
        raise ValueError(f"{name}: a row of FP4 must have a multiple of 32 numbers, got {depth}")
    shapes = {block: [*leading, num_scales(depth, block, FP4)] for block in (MXFP4, NVFP4)}
    if [*scales.shape] not in shapes.values():
        raise ValueError(
            f"{name} must have shape {shapes[MXFP4]} of MXFP4 or {shapes[NVFP4]} of NVFP4, got "
            f"{[*scales.shape]}"
        )


def dequantized(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight in float32 or better, and round to ``dtype``.

    Args:
        weight: [..., N, K] int8, or [..., N, K / 2] uint8, or [..., N, K / 8] int32 of FP4.
        scales: [..., N], or [..., N, K / group], or [..., N, K / group, 2] of scales and zero
            points, float32. Of FP4 uint8, [..., N, K / 32] or [..., N, K / 16 + 4].
        dtype: of the result.
    """
    compute = torch.promote_types(dtype, torch.float32)
    if weight.dtype == FP4:
        block = group_of(weight, scales)
        scales = _fp4_scales(scales, block, compute)
        groups = _fp4_numbers(weight).to(compute).unflatten(-1, (scales.shape[-1], block))
        scaled: Tensor = groups * scales[..., None]
        return scaled.flatten(-2).to(dtype)
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


def _fp4_numbers(words: Tensor) -> Tensor:
    """Unpack FP4 numbers [..., K / 8] -> [..., K] float32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return _fp4_worth(((words[..., None] >> shifts) & 15).flatten(-2))


def _fp4_worth(codes: Tensor) -> Tensor:
    """Convert four bits each to the number of FP4 that they stand for."""
    size = codes & 7
    twice = torch.where(size < 4, size, (2 + (size & 1)) << (size >> 1) >> 1)
    return torch.where(codes > 7, -twice, twice) * 0.5


def _fp4_scales(stored: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Convert scales of blocks from bytes to what numbers are multiplied by."""
    if block == NVFP4:
        scales, factor = stored.split([stored.shape[-1] - FACTOR_BYTES, FACTOR_BYTES], -1)
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=stored.device)
        bits = (factor.to(torch.int32) << shifts).sum(-1, keepdim=True, dtype=torch.int32)
        factors: Tensor = bits.view(torch.float32).to(dtype)
        made: Tensor = scales.view(torch.float8_e4m3fn).to(dtype) * factors
        return made
    wide = stored.to(torch.int32)
    # The first is a denormal float; the last one stands for NaN.
    bits = (wide << 23) | ((wide == 0) | (wide == 255)).to(torch.int32) << 22
    return bits.view(torch.float32).to(dtype)


def in_fp4(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantize a weight [..., N, K] to MXFP4 (block 32) or NVFP4 (16): numbers, and their scales.

    Of two scales, a block takes the one with the least sum of squared errors. In NVFP4, each row
    has the factor with which its largest scale is the largest of E4M3.
    """
    depth = weight.shape[-1]
    if depth % MXFP4:
        raise ValueError(f"a weight in FP4 must have a multiple of 32 columns, got {depth}")
    flat = _finite_rows(weight)
    numbers = flat.new_empty((len(flat), depth // 8), dtype=FP4)
    scales = flat.new_empty((len(flat), num_scales(depth, block, FP4)), dtype=torch.uint8)
    if weight.device.type == "cpu" and compiler_missing() is None:
        quantize(flat, numbers, scales, block)
    else:
        _fill_fp4(flat, numbers, scales, block)
    leading = weight.shape[:-1]
    return numbers.view(*leading, depth // 8), scales.view(*leading, scales.shape[-1])


def _fill_fp4(flat: Tensor, numbers: Tensor, scales: Tensor, block: int) -> None:
    depth = flat.shape[-1]
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=flat.device)
    for rows in _stretches(flat):
        groups = flat[rows].float().unflatten(-1, (depth // block, block))
        first, second = _fp4_scales_near(groups, block)
        codes, error = _nearest_fp4(groups, first, block)
        others, smaller = _nearest_fp4(groups, second, block)
        is_better = smaller < error
        codes = torch.where(is_better[..., None], others, codes)
        first[:, : depth // block][is_better] = second[:, : depth // block][is_better]
        numbers[rows] = (codes.view(len(codes), depth // 8, 8) << shifts).sum(-1, dtype=FP4)
        scales[rows] = first


def _fp4_scales_near(groups: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Choose two scales for each block, as they are stored."""
    largest = groups.abs().amax(-1)
    if block == MXFP4:  # with the first, the largest number is from 4 to 8, and cut off from 6 on
        exponents = (largest.frexp().exponent + 124).clamp(1, 253)
        return exponents.to(torch.uint8), (exponents + 1).to(torch.uint8)
    top = largest.amax(-1, keepdim=True) if largest.numel() else largest.sum(-1, keepdim=True)
    factor = _not_zero(top / (_LARGEST_FP4 * _LARGEST_E4M3))
    stored = []
    for becomes in (_LARGEST_FP4, 4.0):  # of the largest number
        scales = (largest / becomes / factor).clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
        stored.append(torch.cat((scales.view(torch.uint8), factor.view(torch.uint8)), -1))
    return stored[0], stored[1]


def _nearest_fp4(groups: Tensor, stored: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Find the nearest numbers for scales as they are stored, and the sums of squared errors.

    Numbers up to 2 are 0.5 apart, those up to 4 are 1, and the others 2.
    """
    scales = _fp4_scales(stored, block, torch.float32)[..., None]
    scaled = groups / _not_zero(scales)
    sizes = scaled.abs().clamp_(max=_LARGEST_FP4)
    step = torch.exp2((sizes >= 2).int() + (sizes >= 4) - 1.0)
    steps = (sizes / step).round_()
    error = (steps * step).copysign_(scaled).mul_(scales).sub_(groups).square_()
    while error.shape[-1] > 1:  # in this order on every machine
        first_half, second_half = error.chunk(2, -1)
        error = first_half + second_half
    codes = steps.add_(2 * step.log2_().add_(1)).to(torch.int32)
    return codes.add_(scaled < 0, alpha=8), error.squeeze(-1)


def in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [..., N, K] to INT8: the nearest numbers, and their scales."""
    flat = _finite_rows(weight)
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
    flat = _finite_rows(weight)
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


def _finite_rows(weight: Tensor) -> Tensor:
    """Return the rows of a weight [..., N, K] as [M, K].

    Raises:
        ValueError: it has NaN or infinite values, which are near no number.
    """
    if weight.numel() and not bool(torch.stack(weight.aminmax()).isfinite().all()):
        raise ValueError("a weight to be quantized has NaN or infinite values")
    return weight.flatten(0, -2)


def _not_zero(scales: Tensor) -> Tensor:
    """Replace scales of groups that are all 0, where any scale will do."""
    return torch.where(scales == 0, 1.0, scales)


def _stretches(rows: Tensor) -> list[slice]:
    count = max(1, _AT_ONCE // max(1, rows.shape[-1]))
    return [slice(i, i + count) for i in range(0, len(rows), count)]
