"""top_k: public function, validation, schema and the list of implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS, Capability, Implementation
from torch_hybrid.ops.core.registration import check_impl, define_op
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

IMPLEMENTATIONS = {
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            limits={"num_columns": 1024, "k": 32},
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.top_k._triton:top_k",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), cuda_graph=True),
        launcher="torch_hybrid.ops.top_k._torch:top_k",
    ),
}


def top_k(x: Tensor, k: int, *, impl: str) -> tuple[Tensor, Tensor]:
    """The k largest elements along the last dim, the largest first, and their places.

    Of equal elements the first stands first, and NaN is larger than any number. ``torch.topk``
    leaves the order of equal ones open.

    Args:
        x: [..., E], float32, bfloat16 or float16, E at least k.
        k: at least 1.
        impl: name in IMPLEMENTATIONS.

    Returns:
        The elements, [..., k] in the dtype of x, and their places, [..., k] int64.

    Raises:
        ValueError: a size, dtype or option is wrong.
    """
    if x.dim() == 0 or not 1 <= k <= x.shape[-1]:
        raise ValueError(f"x must have at least k = {k} elements in a row, got {list(x.shape)}")
    if x.dtype not in FLOATS:
        raise ValueError(f"x must be a floating point tensor, got {x.dtype}")
    check_impl(impl, IMPLEMENTATIONS, x.device, {"num_columns": x.shape[-1], "k": k})
    values, places = TOP_K(x, k, impl=impl)
    return values, places


def _fake(x: Tensor, k: int, *, impl: str) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


TOP_K = define_op(
    "top_k(Tensor x, int k, *, str impl) -> (Tensor, Tensor)",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
