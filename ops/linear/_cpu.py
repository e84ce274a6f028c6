"""The products of ``products.h``, and torch's own for many rows where it is the faster one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.formats.stored_weights import are_integers, format_of, group_of, has_zeros
from torch_hybrid.ops.linear.by_torch import product_by_torch
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import tuning

# Past it, torch's product of one weight after the other may be faster: see ``cpu_tuning``.
MAX_ROWS = 128
# oneDNN's product of bf16 in tiles of AMX reads past the end of rows of another depth, into what
# lies beside them: NaN there becomes NaN in the result (torch 2.13).
_TILE_DEPTH = 32

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


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scales: Sequence[Tensor] | None = None,
    is_invariant: bool = False,
) -> Tensor:
    """See ``torch_hybrid.ops.linear.op.linear``."""
    num_rows, depth = x.shape
    sizes = [weight.shape[0] for weight in weights]
    y = x.new_empty(num_rows, sum(sizes))
    measured = tuning(x.dtype)
    by_torch = scales is None and measured.many_by_torch and not is_invariant
    if num_rows > MAX_ROWS and by_torch and depth % _TILE_DEPTH == 0:
        return product_by_torch(x, weights, biases, y)
    rows: list[int] = []
    stored = [(0, 0, False)] * len(sizes)  # pointer, numbers of a group, whether it has zero points
    if scales is not None:
        stored = [
            (scale.data_ptr(), group_of(weight, scale), has_zeros(weight, scale))
            for weight, scale in zip(weights, scales, strict=True)
        ]
    of_weights = zip(weights, biases, sizes, stored, strict=True)
    for weight, bias, size, (scale_ptr, group, zeros) in of_weights:
        bias_ptr = 0 if bias is None else bias.data_ptr()
        rows += (weight.data_ptr(), scale_ptr, bias_ptr, size, group, zeros)
    run = _RUN_INTEGERS if are_integers(weights[0].dtype) else _RUN
    run(
        x,
        y,
        num_rows,
        depth,
        x.stride(0),
        y.stride(0),
        len(sizes),
        measured.streams,
        measured.by_hardware,
        format_of(weights[0].dtype),
        x.dtype is torch.bfloat16,
        is_invariant,
        torch.get_num_threads(),
        *rows,
    )
    return y
