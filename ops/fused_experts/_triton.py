# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": pairs of a token and its expert, grouped by expert on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts._triton_few import few_tokens
from torch_hybrid.ops.triton_devices import is_hopper
from torch_hybrid.ops.triton_products import dot

# Up to so many tokens, hardly an expert has two of them.
_FEW_TOKENS = 4
_CHUNK = 128  # pairs that a program brings into the order of their experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A block of ``block_m`` pairs times ``block_n`` rows of weights, ``block_k`` columns at a
    time. Decided by shapes alone, so that a captured graph serves any choice of experts."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_pairs: int, num_experts: int, like: Tensor) -> Tile:
        """For inputs of the dtype and device of ``like``."""
        if like.dtype == torch.float32:  # outside the tensor cores, on operands in registers
            return cls(block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=2)
        # Most experts have less than twice their share: then one block holds all their pairs.
        rows = triton.next_power_of_2(2 * triton.cdiv(num_pairs, num_experts))
        if rows <= 16:
            return cls(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=3)
        if rows <= 64:
            return cls(block_m=rows, block_n=128, block_k=64, num_warps=4, num_stages=4)
        block_n, stages = (256, 4) if is_hopper(like.device) else (128, 3)
        return cls(block_m=128, block_n=block_n, block_k=64, num_warps=8, num_stages=stages)

    def num_blocks(self, num_pairs: int, num_experts: int) -> int:
        """Blocks of pairs for any choice of experts: each that is hit may leave one unfilled."""
        most_hit = min(num_pairs, num_experts)
        return (num_pairs - most_hit) // self.block_m + most_hit


def fused_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str,
) -> Tensor:
    """Launcher of ``torch_hybrid::fused_experts``."""
    out = x.new_empty(x.shape)
    if expert_ids.numel() == 0 or down.shape[0] == 0:
        return out.zero_()
    inputs = (x, expert_ids, expert_weights, gate_up, down)
    if x.shape[0] <= _FEW_TOKENS:
        few_tokens(*inputs, out, activation=activation)
    else:
        _many_tokens(*inputs, out, activation=activation)
    return out


def _many_tokens(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    out: Tensor,
    *,
    activation: str,
) -> None:
    """Fill ``out``: pairs grouped by expert, two products for each, and their weighted sums."""
    num_tokens, top_k = expert_ids.shape
    num_experts, dim, width = down.shape
    num_pairs = num_tokens * top_k
    has_gate = activation == "silu"
    order, starts = _group(expert_ids, num_experts)
    hidden = x.new_empty(num_pairs, width)
    results = x.new_empty(num_pairs, dim)
    tile = Tile.of(num_pairs, num_experts, x)
    num_blocks = tile.num_blocks(num_pairs, num_experts)
    block_n = tile.block_n // (1 + has_gate)
    _gate_up_kernel[(num_blocks * triton.cdiv(width, block_n),)](
        x,
        gate_up,
        hidden,
        order,
        starts,
        x.stride(0),
        HAS_GATE=has_gate,
        TOP_K=top_k,
        E=num_experts,
        D=dim,
        I=width,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    _down_kernel[(num_blocks * triton.cdiv(dim, tile.block_n),)](
        hidden,
        down,
        results,
        order,
        starts,
        E=num_experts,
        D=dim,
        I=width,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    block = min(1024, triton.next_power_of_2(dim))
    _combine_kernel[(num_tokens, triton.cdiv(dim, block))](
        results,
        expert_ids,
        expert_weights,
        out,
        TOP_K=top_k,
        E=num_experts,
        D=dim,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _group(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Numbers of the pairs, those of an expert in a row, and where each expert's begin.

    A counting sort in chunks of pairs.
    """
    num_pairs = expert_ids.numel()
    order = expert_ids.new_empty(num_pairs, dtype=torch.int32)
    starts = expert_ids.new_empty(num_experts + 1, dtype=torch.int32)
    chunk = max(16, min(_CHUNK, triton.next_power_of_2(num_pairs)))
    num_chunks = triton.cdiv(num_pairs, chunk)
    counts = expert_ids.new_empty(num_chunks + 1, num_experts, dtype=torch.int32)
    sizes = {"E": num_experts, "BLOCK_E": max(16, triton.next_power_of_2(num_experts)), "C": chunk}
    if num_chunks > 1:
        _count_kernel[(num_chunks,)](expert_ids, counts, num_pairs, **sizes, num_warps=4)
        _add_up_kernel[(triton.cdiv(num_experts, 16),)](
            counts, num_chunks, E=num_experts, BLOCK_E=16, BLOCK=64, num_warps=4
        )
    _place_kernel[(num_chunks,)](
        expert_ids,
        counts,
        order,
        starts,
        num_pairs,
        num_chunks,
        **sizes,
        ONE_CHUNK=num_chunks == 1,
        num_warps=8,
    )
    return order, starts


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    expert_ids: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """One program: how many of a chunk of C pairs each expert has."""
    pair = tl.program_id(0) * C + tl.arange(0, C)
    chosen = tl.load(expert_ids + pair, mask=pair < num_pairs, other=E).to(tl.int32)
    expert = tl.arange(0, BLOCK_E)
    count = tl.histogram(chosen, BLOCK_E, mask=chosen < E)
    tl.store(counts + tl.program_id(0) * E + expert, count, mask=expert < E)


@triton.jit(do_not_specialize=["num_chunks"])
def _add_up_kernel(
    counts: tl.tensor,
    num_chunks: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: for BLOCK_E experts, counts of each chunk to those of all chunks before it.

    The row after the last chunk's has those of all chunks.
    """
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], dtype=tl.int32)
    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        mask = (chunk < num_chunks)[:, None] & (expert < E)[None, :]
        p_count = counts + chunk[:, None] * E + expert[None, :]
        count = tl.load(p_count, mask=mask, other=0)
        tl.store(p_count, before[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        before += tl.sum(count, 0)
    tl.store(counts + num_chunks * E + expert, before, mask=expert < E)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _place_kernel(
    expert_ids: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    num_pairs: tl.tensor,
    num_chunks: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    C: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
) -> None:
    """One program: a chunk of C pairs, each to its place in the order."""
    own = tl.program_id(0)
    nth = tl.arange(0, C)
    pair = own * C + nth
    chosen = tl.load(expert_ids + pair, mask=pair < num_pairs, other=E).to(tl.int32)
    expert = tl.arange(0, BLOCK_E)
    if ONE_CHUNK:
        count = tl.histogram(chosen, BLOCK_E, mask=chosen < E)
        first = tl.cumsum(count, 0) - count
        start = first
    else:
        count = tl.load(counts + num_chunks * E + expert, mask=expert < E, other=0)
        start = tl.cumsum(count, 0) - count
        first = start + tl.load(counts + own * E + expert, mask=expert < E, other=0)
    if own == 0:
        tl.store(starts + expert, start, mask=expert < E)
        tl.store(starts + E, tl.sum(count, 0))
    is_before = (chosen[None, :] == chosen[:, None]) & (nth[None, :] < nth[:, None])
    place = tl.gather(first, tl.minimum(chosen, E - 1), 0) + tl.sum(is_before.to(tl.int32), 1)
    tl.store(order + place, pair, mask=chosen < E)


@triton.jit
def _rows_of_block(
    starts: tl.tensor, block: tl.tensor, E: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The expert of a block of M rows, E when it is idle, and where in the order its rows begin
    and end."""
    index = tl.arange(0, BLOCK_E)
    begin = tl.load(starts + index, mask=index < E, other=0)
    end = tl.load(starts + index + 1, mask=index < E, other=0)
    count = (end - begin + M - 1) // M
    is_before = (tl.cumsum(count, 0) <= block) & (index < E)
    expert = tl.sum(is_before.to(tl.int32), 0)
    first = block - tl.sum(tl.where(is_before, count, 0), 0)
    is_own = index == expert
    begin = tl.sum(tl.where(is_own, begin, 0), 0) + first * M
    return expert, begin, tl.sum(tl.where(is_own, end, 0), 0)


@triton.jit
def _add_product(
    acc: tl.tensor, lost: tl.tensor, x: tl.tensor, w: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """``acc + x @ w``, and what float32 sums lose to rounding, which the next one makes up for.

    Each output is the sum of a whole row of weights, one product after the other.
    """
    if x.dtype == tl.float32:
        part = tl.dot(x, w, input_precision="ieee") - lost
        total = acc + part
        lost = (total - acc) - part
        acc = total
    else:
        acc = dot(x, w, acc)
    return acc, lost


@triton.jit
def _gate_up_kernel(
    x: tl.tensor,
    gate_up: tl.tensor,
    hidden: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    stride_x: tl.tensor,
    HAS_GATE: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_N hidden activations of BLOCK_M pairs of one expert."""
    NUM_COLUMNS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = _rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    row = begin + tl.arange(0, BLOCK_M)
    mask_m = row < end
    pair = tl.load(order + row, mask=mask_m, other=0).to(tl.int64)
    index_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = index_n < I
    index_k = tl.arange(0, BLOCK_K)
    p_x = x + (pair // TOP_K * stride_x)[:, None] + index_k[None, :]
    p_w = gate_up + expert.to(tl.int64) * ((1 + HAS_GATE) * I * D)
    p_w += index_n[None, :] * D + index_k[:, None]
    b_gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    lost_gate = b_gate
    b_up = b_gate
    lost_up = b_gate
    for first in range(0, D, BLOCK_K):
        mask_k = first + index_k < D
        mask_w = mask_k[:, None] & mask_n[None, :]
        b_x = tl.load(p_x + first, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        if HAS_GATE:
            b_w = tl.load(p_w + first, mask=mask_w, other=0.0)
            b_gate, lost_gate = _add_product(b_gate, lost_gate, b_x, b_w)
        b_w = tl.load(p_w + HAS_GATE * I * D + first, mask=mask_w, other=0.0)
        b_up, lost_up = _add_product(b_up, lost_up, b_x, b_w)
    if HAS_GATE:
        b_up *= b_gate / (1 + tl.exp(-b_gate))
    else:
        b_up = tl.maximum(b_up, 0.0)
        b_up *= b_up
    p_hidden = hidden + pair[:, None] * I + index_n[None, :]
    tl.store(p_hidden, b_up.to(hidden.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _down_kernel(
    hidden: tl.tensor,
    down: tl.tensor,
    results: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_N outputs of BLOCK_M pairs of one expert."""
    NUM_COLUMNS: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = _rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    row = begin + tl.arange(0, BLOCK_M)
    mask_m = row < end
    pair = tl.load(order + row, mask=mask_m, other=0).to(tl.int64)
    index_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = index_n < D
    index_k = tl.arange(0, BLOCK_K)
    p_x = hidden + pair[:, None] * I + index_k[None, :]
    p_w = down + expert.to(tl.int64) * (D * I) + index_n[None, :] * I + index_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    lost = acc
    for first in range(0, I, BLOCK_K):
        mask_k = first + index_k < I
        b_x = tl.load(p_x + first, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b_w = tl.load(p_w + first, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc, lost = _add_product(acc, lost, b_x, b_w)
    p_out = results + pair[:, None] * D + index_n[None, :]
    tl.store(p_out, acc.to(results.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _combine_kernel(
    results: tl.tensor,
    expert_ids: tl.tensor,
    expert_weights: tl.tensor,
    out: tl.tensor,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK outputs of one token."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        is_there = tl.load(expert_ids + pair) < E  # else nothing was written for it
        weight = tl.load(expert_weights + pair).to(tl.float32)
        result = tl.load(results + pair * D + index, mask=(index < D) & is_there, other=0.0)
        acc += tl.where(is_there, weight, 0.0) * result.to(tl.float32)
    tl.store(out + token * D + index, acc.to(out.dtype.element_ty), mask=index < D)
