"""power_sum: public function, validation, schema and the list of implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS_AND_FLOAT64,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.registration import check_dtypes, check_impl, check_shapes, define_op
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

IMPLEMENTATIONS = {
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=frozenset({BATCH_INVARIANT}),
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.power_sum._triton:power_sum",
    ),
    "torch": Implementation(
        capability=Capability(
            devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64, cuda_graph=True
        ),
        launcher="torch_hybrid.ops.power_sum._torch:power_sum",
    ),
}


def power_sum(x: Tensor, power: int, addend: Tensor | None = None, *, impl: str) -> Tensor:
    """The sum of the elements along the last dim, or of their squares.

    ``out[...] = sum(y[..., d] ** power for d)`` of ``y = x + addend``, which is rounded to the
    dtype of x. Sums are float32, of float64 tensors float64.

    Args:
        x: [..., D] float, rows any distance apart.
        power: 1 or 2.
        addend: like x; None: there is none.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [...] float32, of float64 tensors float64. But with "torch" a row's has the bits that it has
        alone, wherever it lies.

    Raises:
        ValueError: a size, dtype or option is wrong.
    """
    if x.dim() == 0:
        raise ValueError(f"x must have at least one dimension, got {list(x.shape)}")
    if power not in (1, 2):
        raise ValueError(f"power must be 1 or 2, got {power}")
    check_shapes({"addend": (addend, x.shape)})
    check_dtypes({"addend": (addend, x.dtype)})
    check_impl(impl, IMPLEMENTATIONS, x.device, dtype=x.dtype)
    out: Tensor = POWER_SUM(x, power, addend, impl=impl)
    return out


def _fake(x: Tensor, power: int, addend: Tensor | None = None, *, impl: str) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))


POWER_SUM = define_op(
    "power_sum(Tensor x, int power, Tensor? addend=None, *, str impl) -> Tensor",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
