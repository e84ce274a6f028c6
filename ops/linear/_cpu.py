"""Implementations "cpp" and "cpp_invariant": the kernels of ``products.h``, or torch's product."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.formats.stored_weights import are_integers, format_of, group_of, has_zeros
from torch_hybrid.ops.linear.by_torch import product_by_torch
from torch_hybrid.ops.linear.op import Linear
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import tuning

# Past it, torch's product of one weight after the other may be faster: see ``cpu_tuning``.
MAX_ROWS = 128
# oneDNN's product of bf16 in tiles of AMX reads past the end of rows of another depth, into what
# lies beside them: NaN there becomes NaN in the result (torch 2.13).
_TILE_DEPTH = 32
_UNSCALED = (0, 0, False)  # pointer to scales, numbers of a group, whether it has zero points

SOURCE = Path(__file__).with_name("_cpu.cpp")
INTEGERS = Path(__file__).with_name("_cpu_integers.cpp")
FIELDS = {
    "tensors": "x y",
    "integers": "M K ldx ldy num_weights streams by_hardware format is_bf16 is_invariant "
    "num_threads",
    "row_tensors": "weight scales bias",
    "row_integers": "rows group has_zeros",
}
_RUN = kernel("linear", SOURCE, **FIELDS)
_RUN_INTEGERS = kernel("linear_of_integers", INTEGERS, **FIELDS)


def multiply(
    x: Tensor, weight: Tensor, out: Tensor, *, streams: int = 4, by_hardware: bool = False
) -> None:
    """Multiply by one weight in x's dtype, on one thread, in the form that the caller names.

    Args:
        x: [M, K], dense.
        weight: [N, K], dense.
        out: [M, N], dense; mutated.
        streams, by_hardware: the form, as ``CpuTuning`` has it.
    """
    sizes = (*x.shape, x.stride(0), out.stride(0), 1)
    forms = (streams, by_hardware, format_of(weight.dtype), x.dtype is torch.bfloat16, False, 1)
    _RUN(x, out, *sizes, *forms, weight.data_ptr(), 0, 0, len(weight), 0, False)  # no scales, bias


def linear(x: Linear, *, is_invariant: bool = False) -> Tensor:
    """Run the C++ kernel of the weights' format, or many rows by torch.

    Args:
        x: the op's arguments.
        is_invariant: whether each number of rows takes the product of many, so that a row has the
            bits that it has alone.

    Returns:
        the op's result.
    """
    num_rows, depth = x.x.shape
    measured = tuning(x.x.dtype)
    by_torch = x.scales is None and measured.many_by_torch and not is_invariant
    if num_rows > MAX_ROWS and by_torch and depth % _TILE_DEPTH == 0:
        return product_by_torch(x.x, x.weights, x.biases, x.empty())
    stored = [_UNSCALED] * len(x.weights)
    if x.scales is not None:
        stored = [
            (scale.data_ptr(), group_of(weight, scale), has_zeros(weight, scale))
            for weight, scale in x.scaled
        ]
    rows: list[int] = []
    width = 0
    for weight, bias, (scale_ptr, group, zeros) in zip(x.weights, x.biases, stored, strict=True):
        size = weight.shape[0]
        bias_ptr = 0 if bias is None else bias.data_ptr()
        rows += (weight.data_ptr(), scale_ptr, bias_ptr, size, group, zeros)
        width += size
    y = x.x.new_empty(num_rows, width)
    weight_dtype = x.weights[0].dtype
    run = _RUN_INTEGERS if are_integers(weight_dtype) else _RUN
    run(
        x.x,
        y,
        num_rows,
        depth,
        x.x.stride(0),
        y.stride(0),
        len(x.weights),
        measured.streams,
        measured.by_hardware,
        format_of(weight_dtype),
        x.x.dtype is torch.bfloat16,
        is_invariant,
        torch.get_num_threads(),
        *rows,
    )
    return y
