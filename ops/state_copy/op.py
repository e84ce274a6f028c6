"""Copies and clears of slots and pages in several pools at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.declare import MUTATED, NOTHING, Index, Op, define
from torch_hybrid.ops.implementations import in_cpp, in_torch

_ANY_DTYPE = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8}
)

IMPLEMENTATIONS = {
    "cpp": in_cpp(
        "torch_hybrid.ops.state_copy._cpu:state_copy", dtypes=_ANY_DTYPE, checks_indices=False
    ),
    "torch": in_torch(
        "torch_hybrid.ops.state_copy._torch:state_copy", dtypes=_ANY_DTYPE, cuda_graph=True
    ),
}


@dataclass(slots=True, repr=False, eq=False)
class StateCopy(Op):
    """Copy of index ``src[i]`` of every pool to index ``dst[i]``, or a clear of that.

    One call forks, restores or clears sequences in all layers: slots of recurrent states along
    dim 0, pages of ``kv[2, P, ...]`` along dim 1. It acts as if every source were read before
    any destination is written, which needs no second buffer because the two are disjoint.

    Args:
        pools: contiguous tensors of any shape and dtype, on one device, of equal size along
            ``dim``. Mutated: the indices in ``dst``.
        src: [n] int32; 0, the null index, stands for zeros.
        dst: [n] int32; 0 marks a pair to skip. No index appears twice, apart from 0.
        dim: 0 or 1, the dimension that is indexed.

    Raises:
        ValueError: a shape, dtype or option is wrong. On a CPU also: an index is out of range, a
            dst appears twice, or src and dst are not disjoint.
    """

    pools: Annotated[Sequence[Tensor], MUTATED]
    src: Annotated[Tensor, Index("n", counts=True)]
    dst: Annotated[Tensor, Index("n")]
    dim: int = field(kw_only=True)

    def check_form(self) -> None:
        """Raise ValueError unless sources are a vector."""
        if self.src.dim() != 1:
            raise ValueError(f"src must have 1 dimension, got {self.src.dim()}")

    def check(self) -> None:
        """Raise ValueError for a dimension or a pool that cannot be indexed so."""
        dim = self.dim
        if dim not in (0, 1):
            raise ValueError(f"dim must be 0 or 1, got {dim}")
        for i, pool in enumerate(self.pools):
            if pool.dim() <= dim or pool.shape[dim] != self.pools[0].shape[dim]:
                raise ValueError(
                    f"pools[{i}] must have size {self.pools[0].shape[dim]} along dim {dim}, "
                    f"got shape {list(pool.shape)}"
                )
            if not pool.is_contiguous():
                raise ValueError(f"pools[{i}] must be contiguous, got strides {pool.stride()}")

    def check_indices(self) -> None:
        """Raise ValueError unless pairs are in range, dst unique, and src and dst disjoint."""
        if not self.pools:
            return
        src, dst, size = self.src.tolist(), self.dst.tolist(), self.pools[0].shape[self.dim]
        for name, indices in (("src", src), ("dst", dst)):
            if indices and not 0 <= min(indices) <= max(indices) < size:
                outside = next(index for index in indices if not 0 <= index < size)
                raise ValueError(f"{name} must be in [0, {size}), got {outside}")
        targets = [index for index in dst if index]
        if len(set(targets)) != len(targets):
            twice = next(index for index in targets if targets.count(index) > 1)
            raise ValueError(f"dst must not repeat, got {twice} twice")
        sources = {s for s, d in zip(src, dst, strict=True) if s and d}
        if not sources.isdisjoint(targets):
            shared = sorted(sources.intersection(targets))
            raise ValueError(f"src and dst must be disjoint, got {shared} in both")


state_copy = define(StateCopy, IMPLEMENTATIONS, returns=NOTHING, floats=frozenset())
