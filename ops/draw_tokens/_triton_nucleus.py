# mypy: disable-error-code="untyped-decorator"
"""Where a nucleus ends that no top-k bounds: a bracket of weights, narrowed in a few passes.

A pass adds up, for each of a few thresholds between the bounds, what lies above it, in float32: so
it takes what reading the logits takes. The nucleus ends between two thresholds beside each other,
or beyond where sums are too close to tell. All that is exact comes after, among the weights between
the bounds alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.draw_tokens._triton_search import (
    LEAST,
    SEGMENT,
    best_of,
    has_wide_nucleus,
    logit_of,
)

NUM_PASSES = 2
_TRIES: tl.constexpr = tl.constexpr(16)  # thresholds of a pass, the first its lower bound
_LOWEST: tl.constexpr = tl.constexpr(-40.0)  # log2 of the least weight that counts
# What a sum of float32 may be off, by the weights, their adding up, and those too small to count.
_ERROR: tl.constexpr = tl.constexpr(1e-5)
_SLACK: tl.constexpr = tl.constexpr(1e-4)  # more than a scaled logit is off, which is at least -41
_COLDEST: tl.constexpr = tl.constexpr(1e-9)  # a temperature whose inverse float32 can still hold


def narrow(
    logits: Tensor, settings: Tensor, best: Tensor, row: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """What :func:`end_of_nucleus` reads, of the rows that have a top-p and no top-k.

    Args:
        logits: [N, vocab_size].
        settings: [5, N], contiguous.
        best: [N, S] of each segment.
        row: sizes of a row, as the kernels take them.
    """
    num_rows, num_segments = best.shape
    brackets = logits.new_empty(NUM_PASSES, 3, num_rows, dtype=torch.float32)
    sums = logits.new_empty(NUM_PASSES, num_rows, num_segments, _TRIES.value, dtype=torch.float32)
    for nth in range(NUM_PASSES):
        _narrow_kernel[(num_rows * num_segments,)](
            logits,
            settings,
            best,
            brackets,
            sums,
            num_rows,
            logits.stride(0),
            **row,
            NTH=nth,
            num_warps=8,
        )
    return brackets, sums


@triton.jit
def end_of_nucleus(
    settings: tl.tensor,
    brackets: tl.tensor,
    sums: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PASSES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Bits of two weights between which, or at which, a row's nucleus ends."""
    low, high, _ = _narrowed(settings, brackets, sums, row, num_rows, S, BLOCK_S, PASSES)
    lowest = tl.exp2(low - _SLACK).to(tl.int32, bitcast=True)
    highest = tl.exp2(high + _SLACK).to(tl.int32, bitcast=True)
    return tl.maximum(lowest, LEAST), highest


@triton.jit
def _thresholds(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """[_TRIES] as logarithms, to the base of 2, of weights."""
    return low + (high - low) * (tl.arange(0, _TRIES).to(tl.float32) / _TRIES)


@triton.jit
def _narrowed(
    settings: tl.tensor,
    brackets: tl.tensor,
    sums: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PASSES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A row's bracket after so many passes, as logarithms, and the sum that its nucleus reaches."""
    top_p = tl.load(settings + 3 * num_rows + row)
    # Weights below that are together less than what may be left out: the likeliest alone is 1.
    low = tl.maximum(tl.log2(((1 - top_p) / (S * SEGMENT)).to(tl.float32)) - 1, _LOWEST)
    high = low * 0
    wanted = low * 0
    if PASSES > 0:
        last = brackets + (PASSES - 1) * 3 * num_rows + row
        low = tl.load(last)
        high = tl.load(last + num_rows)
        wanted = tl.load(last + 2 * num_rows)
        nth = tl.arange(0, _TRIES)
        segment = tl.arange(0, BLOCK_S)
        place = ((PASSES - 1) * num_rows + row) * S * _TRIES
        place += segment[:, None] * _TRIES + nth[None, :]
        b_sum = tl.sum(tl.load(sums + place, mask=(segment < S)[:, None], other=0.0), 0)
        if PASSES == 1:  # the first of its sums has all
            wanted = tl.max(b_sum, 0) * top_p.to(tl.float32)
        can_tell = nth > tl.where(tl.load(settings + row) > _COLDEST, 0, _TRIES)
        t = _thresholds(low, high)
        reaches = can_tell & (b_sum >= wanted * (1 + _ERROR))
        misses = can_tell & (b_sum < wanted * (1 - _ERROR))
        low = tl.max(tl.where(reaches, t, low), 0)
        high = tl.min(tl.where(misses, t, high), 0)
    return low, high, wanted


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _narrow_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    best: tl.tensor,
    brackets: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NTH: tl.constexpr,
) -> None:
    """One program: what of a segment is above each threshold of this pass."""
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    likeliest, _ = best_of(best, row, S, BLOCK_S)
    if has_wide_nucleus(settings, likeliest, row, num_rows):
        low, high, wanted = _narrowed(settings, brackets, sums, row, num_rows, S, BLOCK_S, NTH)
        if segment == 0:
            own = brackets + NTH * 3 * num_rows + row
            tl.store(own, low)
            tl.store(own + num_rows, high)
            tl.store(own + 2 * num_rows, wanted)
        inverse = (1.4426950408889634 / tl.maximum(tl.load(settings + row), _COLDEST)).to(
            tl.float32
        )
        t = _thresholds(low, high)
        if NTH == 0:
            t = tl.where(tl.arange(0, _TRIES) == 0, -float("inf"), t)
        b_sum = tl.zeros([_TRIES], tl.float32)
        if (logit_of(tl.load(best + row * S + segment)) - likeliest) * inverse >= tl.min(t, 0):
            token = segment * SEGMENT + tl.arange(0, SEGMENT)
            b_x = tl.load(logits + row * stride + token, mask=token < V, other=-float("inf"))
            b_scaled = (b_x.to(tl.float32) - likeliest) * inverse
            b_w = tl.exp2(b_scaled)
            b_sum = tl.sum(tl.where(b_scaled[None, :] >= t[:, None], b_w[None, :], 0.0), 1)
        place = sums + ((NTH * num_rows + row) * S + segment) * _TRIES
        tl.store(place + tl.arange(0, _TRIES), b_sum)
