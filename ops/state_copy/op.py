"""state_copy: public function, validation, schema and the list of implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import Capability, Implementation
from torch_hybrid.ops.core.registration import check_impl, check_shapes, define_op
from torch_hybrid.ops.native import compiler_missing

_ANY_DTYPE = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8}
)

IMPLEMENTATIONS = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}), dtypes=_ANY_DTYPE, available=compiler_missing
        ),
        launcher="torch_hybrid.ops.state_copy._cpu:state_copy",
    ),
    "torch": Implementation(
        capability=Capability(
            devices=frozenset({"cpu", "cuda"}), dtypes=_ANY_DTYPE, cuda_graph=True
        ),
        launcher="torch_hybrid.ops.state_copy._torch:state_copy",
    ),
}


def state_copy(pools: Sequence[Tensor], src: Tensor, dst: Tensor, *, dim: int, impl: str) -> None:
    """Copy index ``src[i]`` of every pool to index ``dst[i]``, or clear it.

    One call forks, restores or clears sequences in all layers: slots of recurrent states along
    dim 0, pages of ``kv[2, P, ...]`` along dim 1. It acts as if every source were read before
    any destination is written, which needs no second buffer because the two are disjoint.

    Args:
        pools: contiguous tensors of any shape and dtype, on one device, of equal size along
            ``dim``. Mutated: the indices in ``dst``.
        src: [n] int32; 0, the null index, stands for zeros.
        dst: [n] int32; 0 marks a pair to skip. No index appears twice, apart from 0.
        dim: 0 or 1, the dimension that is indexed.
        impl: name in IMPLEMENTATIONS.

    Raises:
        ValueError: a shape, dtype or option is wrong, or, where reading it is free (on a CPU),
            an index is out of range, a dst appears twice, or src and dst are not disjoint.
    """
    check_shapes({"dst": (dst, src.shape)})
    if src.dim() != 1:
        raise ValueError(f"src must have 1 dimension, got {src.dim()}")
    for name, indices in (("src", src), ("dst", dst)):
        if indices.dtype != torch.int32:
            raise ValueError(f"{name} must have dtype torch.int32, got {indices.dtype}")
        if not indices.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {indices.stride()}")
    if dim not in (0, 1):
        raise ValueError(f"dim must be 0 or 1, got {dim}")
    for i, pool in enumerate(pools):
        if pool.dim() <= dim or pool.shape[dim] != pools[0].shape[dim]:
            raise ValueError(
                f"pools[{i}] must have size {pools[0].shape[dim]} along dim {dim}, "
                f"got shape {list(pool.shape)}"
            )
        if not pool.is_contiguous():
            raise ValueError(f"pools[{i}] must be contiguous, got strides {pool.stride()}")
    check_impl(impl, IMPLEMENTATIONS, src.device)
    _STATE_COPY(pools, src, dst, dim=dim, impl=impl)


_STATE_COPY = define_op(
    "state_copy(Tensor(a!)[] pools, Tensor src, Tensor dst, *, int dim, str impl) -> ()",
    implementations=IMPLEMENTATIONS,
)
