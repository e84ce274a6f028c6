"""Names and shapes of the tensors that make up each integer or FP4 weight of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from torch_hybrid.models.checkpoint.content import Packed, Slice, Stored
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.checkpoint.packed_integers import IN_WORD, group_of
from torch_hybrid.models.checkpoint.pieces import values_of
from torch_hybrid.ops.formats.integers import FP4, MXFP4, NVFP4

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A stored word of eight zero points of 8.
_EIGHTS = {"columns": 0x88888888, "columns_v1": 0x77777777}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Format of all integer weights of a checkpoint, by its config.

    Attributes:
        layout: a layout of ``packed_integers.py``.
        bits: bits of a number.
        group: numbers of a row that share a scale; -1 for a whole row.
        has_zeros: whether groups have zero points.
        words: whether numbers are packed into int32 words; else they are int8.
    """

    layout: str
    bits: int = 4
    group: int = -1
    has_zeros: bool = False
    words: bool = True


def with_packed_integers(checkpoint: Checkpoint, scheme: Scheme) -> Checkpoint:
    """Merge the tensors of each integer weight into one entry of the weight's own shape.

    A weight is refused when a model takes it, if one of its tensors is missing, or has another
    shape, dtype or order than ``scheme``.
    """
    tensors = dict(checkpoint.tensors)
    endings = _ENDINGS[scheme.layout, scheme.words]
    for name, numbers in checkpoint.tensors.items():
        if not name.endswith(endings["numbers"]):
            continue
        if not scheme.words and numbers.dtype != torch.int8:
            continue
        layer = name.removesuffix(endings["numbers"])
        found = {what: tensors.pop(layer + ending, None) for what, ending in endings.items()}
        name = f"{layer}.weight"
        try:
            tensors[name] = _weight(checkpoint, name, scheme, numbers, found)
        except ValueError as error:
            shape = _shape(scheme, numbers) if len(numbers.shape) == 2 else numbers.shape
            tensors[name] = replace(numbers, name=name, shape=shape, refusal=error)
    return replace(checkpoint, tensors=tensors)


_OF_ROWS = {
    "scales": ".weight_scale",
    "zeros": ".weight_zero_point",
    "shape": ".weight_shape",
    "order": ".weight_g_idx",
}
_OF_COLUMNS = {"numbers": ".qweight", "scales": ".scales", "zeros": ".qzeros", "order": ".g_idx"}
_ENDINGS = {
    ("rows", True): {"numbers": ".weight_packed", **_OF_ROWS},
    ("rows", False): {"numbers": ".weight", **_OF_ROWS},
    ("fp4", True): {
        "numbers": ".weight_packed",
        **_OF_ROWS,
        "zeros": ".weight_global_scale",
        "of_activations": ".input_global_scale",
    },
    ("columns", True): _OF_COLUMNS,
    ("columns_v1", True): _OF_COLUMNS,
    ("awq", True): _OF_COLUMNS,
}


def _weight(
    checkpoint: Checkpoint,
    name: str,
    scheme: Scheme,
    numbers: Stored,
    found: Mapping[str, Stored | None],
) -> Stored:
    shape = _shape(scheme, numbers)
    check = partial(_check, checkpoint, name)
    num_rows, depth = shape
    num_groups = 1 if scheme.group == -1 else depth // scheme.group
    is_fp4 = scheme.layout == "fp4"
    if is_fp4 and depth % MXFP4:
        raise ValueError(
            f"{name} in {checkpoint.folder} must have rows of a multiple of 32 numbers in FP4, got "
            f"{depth}"
        )
    dtype = torch.uint8 if is_fp4 else numbers.dtype
    check("numbers", numbers, _laid_out(scheme, "numbers", shape), (dtype,))
    expected = _laid_out(scheme, "scales", (num_rows, num_groups))
    scales = check("scales", found["scales"], expected, _scale_dtypes(scheme))
    zeros, has_zeros = found["zeros"], scheme.has_zeros
    if is_fp4:
        if scheme.group == NVFP4:
            check("a global scale", zeros, (1,), (torch.float32,))
        elif zeros is not None:
            raise ValueError(f"{name} of MXFP4 must have no global scale, got {zeros.name}")
    elif has_zeros or zeros is not None:
        expected = _laid_out(scheme, "zeros", (num_rows, num_groups))
        zeros = check("zero points", zeros, expected, (torch.int32,))
    if zeros is not None and not (has_zeros or is_fp4):
        _check_symmetric(checkpoint, zeros, scheme)
        zeros = None
    if (order := found["order"]) is not None:
        _check_order(checkpoint, order, depth, depth // num_groups)
    packed = Packed(
        layout=scheme.layout,
        bits=scheme.bits,
        numbers=_bytes(numbers, scheme),
        scales=scales,
        zeros=zeros,
    )
    weight = Stored(
        name=name,
        file=numbers.file,
        start=numbers.start,
        dtype=numbers.dtype,
        shape=shape,
        packed=packed,
    )
    if scheme.bits == 4 and (depth % num_groups or group_of(weight) == 0):
        raise ValueError(
            f"{name} in {checkpoint.folder} has rows of {depth} numbers in groups of "
            f"{depth / num_groups:g}: groups must be of 32, 64 or 128, or all of a row that these "
            "divide"
        )
    return weight


def _shape(scheme: Scheme, numbers: Stored) -> tuple[int, int]:
    """Compute the shape [N, K] of a weight from that of its stored numbers."""
    if len(numbers.shape) != 2:
        raise ValueError(f"{numbers.name} must have 2 dimensions, got {[*numbers.shape]}")
    high, wide = numbers.shape
    in_word = _in_word(scheme)
    match scheme.layout:
        case "rows" | "fp4":
            return high, wide * in_word
        case "awq":
            return wide * in_word, high
        case _:
            return wide, high * in_word


def _laid_out(scheme: Scheme, what: str, shape: tuple[int, int]) -> tuple[int, ...]:
    """Compute the stored shape of a weight's numbers [N, K], scales or zero points [N, G]."""
    rows, columns = shape
    if what == "numbers":
        in_word = _in_word(scheme)
        match scheme.layout:
            case "rows" | "fp4":
                return rows, columns // in_word
            case "awq":
                return columns, rows // in_word
            case _:
                return columns // in_word, rows
    if what == "zeros":
        rows = -(-rows // IN_WORD)
    return (rows, columns) if scheme.layout in ("rows", "fp4") else (columns, rows)


def _in_word(scheme: Scheme) -> int:
    """Count the numbers in an element of the stored tensor."""
    if scheme.layout == "fp4":
        return 2
    return 32 // scheme.bits if scheme.words else 1


def _scale_dtypes(scheme: Scheme) -> tuple[torch.dtype, ...]:
    if scheme.layout != "fp4":
        return _SCALE_DTYPES
    return (torch.float8_e4m3fn if scheme.group == NVFP4 else torch.uint8,)


def _check(
    checkpoint: Checkpoint,
    name: str,
    what: str,
    stored: Stored | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> Stored:
    if stored is not None and stored.shape == shape and stored.dtype in dtypes:
        return stored
    allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    got = "none"
    if stored is not None:
        got = f"{stored.name} {[*stored.shape]} in {str(stored.dtype).removeprefix('torch.')}"
    raise ValueError(
        f"{name} in {checkpoint.folder} must have {what} of shape {[*shape]} in {allowed}, got "
        f"{got}"
    )


def _bytes(numbers: Stored, scheme: Scheme) -> Stored:
    """View words of INT8 numbers as bytes, four to a word, and bytes of FP4 as words."""
    if scheme.layout == "fp4":
        high, wide = numbers.shape
        return replace(numbers, dtype=FP4, shape=(high, wide // 4))
    if scheme.bits == 4 or not scheme.words:
        return numbers
    high, wide = numbers.shape
    return replace(numbers, dtype=torch.uint8, shape=(high, 4 * wide))


def _values(checkpoint: Checkpoint, stored: Stored) -> Tensor:
    try:
        return values_of(Slice.whole(stored), stored.dtype)
    except OSError as error:
        told = f"cannot read the weights in {checkpoint.folder}: {error}"
        raise ValueError(told) from error


def _check_symmetric(checkpoint: Checkpoint, zeros: Stored, scheme: Scheme) -> None:
    """Check that all zero points are 8, if the config says that there are none."""
    word = _EIGHTS.get(scheme.layout, 0x88888888)
    eights = torch.tensor(word, dtype=torch.int64, device="cpu").to(torch.int32)
    if not (_values(checkpoint, zeros) == eights).all():
        raise ValueError(
            f"{zeros.name} in {checkpoint.folder} has zero points other than 8, which its config "
            "says are symmetric"
        )


def _check_order(checkpoint: Checkpoint, order: Stored, depth: int, group: int) -> None:
    """Check that columns are in the order of their groups."""
    expected = torch.arange(depth, dtype=torch.int64, device="cpu") // group
    if order.shape != (depth,) or not torch.equal(_values(checkpoint, order).long(), expected):
        raise ValueError(
            f"{order.name} in {checkpoint.folder} says that columns are in another order than "
            "their groups (act-order), which is not served"
        )
