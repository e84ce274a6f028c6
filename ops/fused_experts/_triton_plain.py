"""Weights of x's dtype in Triton: the loader for few tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts._triton_few import multiply_few
from torch_hybrid.ops.fused_experts._triton_loader import FewTile, Loader, Stored, unscaled
from torch_hybrid.ops.fused_experts.op import FusedExperts

_FEW_COLUMNS = 256  # that a program reads at once, for few tokens


def few_tokens(x: FusedExperts) -> Tensor:
    """Launch the kernels of few tokens."""
    return multiply_few(x, _LOADER, (_stored(x.gate_up), _stored(x.down)))


def _stored(weight: Tensor) -> Stored:
    """Describe a weight to the kernels."""
    block = min(_FEW_COLUMNS, triton.next_power_of_2(weight.shape[-1]))
    few = FewTile(rows=8, columns=block, shape=(block,), num_stages=4)
    return Stored(numbers=weight, scales=None, form=(block,), few=few)


@triton.jit
def _rows(
    weight: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    first_n: tl.tensor,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tuple:
    """Find rows from ``first_n`` of a part of an expert's, and the offset of the part."""
    index_n = first_n + tl.arange(0, BLOCK_N)
    p_w = weight + expert * (PARTS * R * K) + index_n[:, None] * K
    p_w += tl.arange(0, FORM[0])[None, :]
    return p_w, (index_n < R)[:, None], PART * R * K


@triton.jit
def _multiply(
    rows: tl.tuple,
    p_x: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Multiply rows by BLOCK_K columns of one token: [N, BLOCK_K]."""
    p_w, mask_n, offset = rows
    index_k = tl.arange(0, BLOCK_K)
    mask_k = first + index_k < K
    x = tl.load(p_x + index_k + first, mask=mask_k, other=0.0).to(tl.float32)[None, :]
    w = tl.load(p_w + offset + first, mask=mask_n & mask_k[None, :], other=0.0)
    return w.to(tl.float32) * x


@triton.jit
def _multiply_hidden(
    down: tl.tensor,
    scales: tl.tensor,
    hidden: tl.tensor,
    choice: tl.tuple,
    first_n: tl.tensor,
    first: tl.tensor,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Multiply rows of a pair's expert by its hidden activations and its weight."""
    pair, expert, is_there, weight = choice
    index_n = first_n + tl.arange(0, BLOCK_N)
    index_k = tl.arange(0, BLOCK_K)
    mask_n = (index_n < D)[:, None]
    mask_k = (first + index_k < I) & is_there
    p_w = down + index_n[:, None] * I + index_k[None, :]
    x = tl.load(hidden + pair * I + first + index_k, mask=mask_k, other=0.0)
    w = tl.load(p_w + expert * (D * I) + first, mask=mask_n & mask_k[None, :], other=0.0)
    return w.to(tl.float32) * (x.to(tl.float32) * weight)[None, :]


_LOADER = Loader(
    rows=_rows, add=None, scale=unscaled, multiply=_multiply, multiply_hidden=_multiply_hidden
)
