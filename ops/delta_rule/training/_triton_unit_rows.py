# mypy: disable-error-code="untyped-decorator"
"""Queries and keys of unit length in Triton, and gradients of what they were before.

A launch reads and writes a tensor once: in torch's operations both took longer than all products
of a backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_rule.training.op import TrainedDeltaRule
from torch_hybrid.ops.triton.products import inverse_root

_NUMBERS = 4096  # of a program


@dataclass(frozen=True, slots=True)
class UnitRows:
    """Queries and keys as a rule had them, and factors [T, H] if those made them of unit length."""

    q: Tensor
    k: Tensor
    factors_q: Tensor | None = None
    factors_k: Tensor | None = None

    def unnormalise(self, dq: Tensor, dk: Tensor) -> None:
        """Take gradients to those of the rows before, in place."""
        if self.factors_q is not None and self.factors_k is not None:
            unnormalise(dq, self.q, self.factors_q)
            unnormalise(dk, self.k, self.factors_k)


def unit_rows(x: TrainedDeltaRule) -> UnitRows:
    """Scale q and k to unit length, if the forward made them so."""
    if not x.qk_l2norm:
        return UnitRows(x.q, x.k)
    (q, factors_q), (k, factors_k) = normalise(x.q), normalise(x.k)
    return UnitRows(q, k, factors_q, factors_k)


def normalise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scale rows [T, H, K] to unit length; return the factors [T, H] too."""
    unit = torch.empty_like(rows, memory_format=torch.contiguous_format)
    factors = rows.new_empty(rows.shape[:2], dtype=torch.float32)
    grid, sizes = _blocks(rows)
    _normalise_kernel[grid](rows, unit, factors, factors.numel(), rows.stride(0), **sizes)
    return unit, factors


def unnormalise(grad: Tensor, unit: Tensor, factors: Tensor) -> None:
    """Take gradients of rows of unit length to those of the rows before, in place."""
    grid, sizes = _blocks(unit)
    _unnormalise_kernel[grid](grad, unit, factors, factors.numel(), **sizes)


def _blocks(rows: Tensor) -> tuple[tuple[int], dict[str, int]]:
    num_tokens, num_heads, dim = rows.shape
    block_k: int = triton.next_power_of_2(dim)
    block = max(1, _NUMBERS // block_k)
    sizes = {"H": num_heads, "K": dim, "BLOCK": block, "BLOCK_K": block_k}
    return (triton.cdiv(num_tokens * num_heads, block),), sizes


@triton.jit(do_not_specialize=["num_rows"])
def _normalise_kernel(
    rows: tl.tensor,
    unit: tl.tensor,
    factors: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Scale BLOCK rows to unit length: one program."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    index_k = tl.arange(0, BLOCK_K)[None, :]
    mask = (row < num_rows)[:, None] & (index_k < K)
    p_rows = rows + (row // H * stride + row % H * K)[:, None] + index_k
    b_rows = tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
    factor = inverse_root(tl.sum(b_rows * b_rows, 1) + 1e-6)
    tl.store(factors + row, factor, mask=row < num_rows)
    b_unit = (b_rows * factor[:, None]).to(unit.dtype.element_ty)
    tl.store(unit + row[:, None] * K + index_k, b_unit, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _unnormalise_kernel(
    grad: tl.tensor,
    unit: tl.tensor,
    factors: tl.tensor,
    num_rows: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Replace BLOCK gradients of rows of unit length by those of the rows before: one program."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    index_k = tl.arange(0, BLOCK_K)[None, :]
    mask = (row < num_rows)[:, None] & (index_k < K)
    place = row[:, None] * K + index_k
    b_grad = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    b_unit = tl.load(unit + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(factors + row, mask=row < num_rows, other=0.0)
    along = tl.sum(b_unit * b_grad, 1)[:, None]
    b_grad = factor[:, None] * (b_grad - b_unit * along)
    tl.store(grad + place, b_grad.to(grad.dtype.element_ty), mask=mask)
