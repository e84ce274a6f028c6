"""merge_states: public function, validation, schema and the list of implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS, Capability, Implementation
from torch_hybrid.ops.core.registration import check_dtypes, check_impl, check_shapes, define_op
from torch_hybrid.ops.native import compiler_missing

IMPLEMENTATIONS = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            multiples={"v_head_dim": 16},
            available=compiler_missing,
        ),
        launcher="torch_hybrid.ops.merge_states._cpu:merge_states",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), cuda_graph=True),
        launcher="torch_hybrid.ops.merge_states._torch:merge_states",
    ),
}


def merge_states(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, *, impl: str
) -> tuple[Tensor, Tensor]:
    """Join two attention results over disjoint sets of keys into that over both sets.

    Commutative, and associative up to rounding; ``(0, -inf)``, the result over no keys, is its
    identity, also when both are empty.

    Args:
        o_a: [T, H, Dv], float32, bfloat16 or float16, contiguous.
        lse_a: [T, H] float32, contiguous, natural logarithm: a base-2 one must be multiplied by
            ln 2 first.
        o_b: as o_a.
        lse_b: as lse_a.
        impl: name in IMPLEMENTATIONS.

    Returns:
        The output, [T, H, Dv] in the dtype of o_a, and its natural-log LSE, [T, H] float32.

    Raises:
        ValueError: a shape, dtype or option is wrong.
    """
    if o_a.dim() != 3:
        raise ValueError(f"o_a must have 3 dimensions, got {o_a.dim()}")
    rows = o_a.shape[:2]
    check_shapes({"o_b": (o_b, o_a.shape), "lse_a": (lse_a, rows), "lse_b": (lse_b, rows)})
    if o_a.dtype not in FLOATS:
        raise ValueError(f"o_a must be a floating point tensor, got {o_a.dtype}")
    check_dtypes(
        {
            "o_b": (o_b, o_a.dtype),
            "lse_a": (lse_a, torch.float32),
            "lse_b": (lse_b, torch.float32),
        }
    )
    for name, tensor in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    check_impl(impl, IMPLEMENTATIONS, o_a.device)
    out, lse = _MERGE_STATES(o_a, lse_a, o_b, lse_b, impl=impl)
    return out, lse


_MERGE_STATES = define_op(
    "merge_states(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, *, str impl)"
    " -> (Tensor, Tensor)",
    like=["o_a", "lse_a"],
    implementations=IMPLEMENTATIONS,
)
