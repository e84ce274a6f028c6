"""End of a nucleus that no top-k bounds: a bracket of weights, narrowed in a few passes.

A pass adds up, for each of a few thresholds between the bounds, what lies above it, in float32: so
it takes little more than to read the logits. The nucleus ends between two thresholds beside each
other, or beyond where sums are too close to tell. All that is exact comes after, and looks for the
end among the weights between the bounds alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.draw_tokens._triton_search import (
    LEAST,
    SEGMENT,
    best_of,
    logit_of,
    wants_nucleus,
)
from torch_hybrid.ops.triton.launch import launch

NUM_PASSES = 3
_TRIES: tl.constexpr = tl.constexpr(8)  # thresholds of a pass, the first its lower bound
_LOWEST: tl.constexpr = tl.constexpr(-40.0)  # log2 of the least weight that counts
# What a sum of float32 may be off, by the weights, their adding up, and those too small to count.
_ERROR: tl.constexpr = tl.constexpr(1e-5)
_SLACK: tl.constexpr = tl.constexpr(1e-4)  # more than a scaled logit is off, which is at least -41
_COLDEST: tl.constexpr = tl.constexpr(1e-9)  # a temperature whose inverse float32 can still hold
# What is known of a row, one after the other in a tensor [5, N].
_LIKELIEST: tl.constexpr = tl.constexpr(0)  # its largest logit
_INVERSE: tl.constexpr = tl.constexpr(1)  # of its temperature, for powers of 2; 0: it has no end
_LOW: tl.constexpr = tl.constexpr(2)  # of the bracket, as powers of 2
_HIGH: tl.constexpr = tl.constexpr(3)
_WANTED: tl.constexpr = tl.constexpr(4)  # the sum that its nucleus reaches


def narrow(held: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Make what :func:`end_of_nucleus` reads, of the rows that have a top-p and no top-k.

    Args:
        held: arguments of the kernels, by name: the logits [N, vocab_size], the settings [5, N],
            contiguous, the best [N, S] of each segment, and the sizes of a row.
    """
    logits, (num_rows, num_segments) = held["logits"], held["best"].shape
    known = logits.new_empty(5, num_rows, dtype=torch.float32)
    sums = logits.new_empty(num_rows, num_segments, _TRIES.value, dtype=torch.float32)
    held = {**held, "known": known, "sums": sums}
    for nth in range(NUM_PASSES):
        launch(_bracket_kernel, (num_rows,), held, NTH=nth, num_warps=4)
        by_segment = (num_rows * num_segments,)
        launch(_sums_kernel, by_segment, held, IS_FIRST=nth == 0, num_warps=4)
    return known, sums


@triton.jit
def end_of_nucleus(
    known: tl.tensor,
    sums: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Find the bits of two weights between which, or at which, a row's nucleus ends."""
    wanted = tl.load(known + _WANTED * num_rows + row)
    low, high = _narrowed(known, sums, wanted, row, num_rows, S, BLOCK_S)
    lowest = tl.exp2(low - _SLACK).to(tl.int32, bitcast=True)
    highest = tl.exp2(high + _SLACK).to(tl.int32, bitcast=True)
    return tl.maximum(lowest, LEAST), highest


@triton.jit
def _threshold(low: tl.tensor, high: tl.tensor, nth: tl.tensor) -> tl.tensor:
    """Return the logarithm, to the base of 2, of a weight that a pass tries."""
    return low + (high - low) * (nth / _TRIES)


@triton.jit
def _sums_of(sums: tl.tensor, row: tl.tensor, S: tl.constexpr, BLOCK_S: tl.constexpr) -> tl.tensor:
    """Add up the sums [_TRIES] of a row."""
    segment = tl.arange(0, BLOCK_S)
    place = (row * S + segment[:, None]) * _TRIES + tl.arange(0, _TRIES)[None, :]
    return tl.sum(tl.load(sums + place, mask=(segment < S)[:, None], other=0.0), 0)


@triton.jit
def _narrowed(
    known: tl.tensor,
    sums: tl.tensor,
    wanted: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Narrow a row's bracket after the pass that left these sums."""
    low = tl.load(known + _LOW * num_rows + row)
    high = tl.load(known + _HIGH * num_rows + row)
    nth = tl.arange(0, _TRIES)
    b_sum = _sums_of(sums, row, S, BLOCK_S)
    b_threshold = _threshold(low, high, nth.to(tl.float32))
    # The sum at the lower bound is known to reach, and may be of something else.
    reaches = (nth > 0) & (b_sum >= wanted * (1 + _ERROR))
    misses = (nth > 0) & (b_sum < wanted * (1 - _ERROR))
    return (
        tl.max(tl.where(reaches, b_threshold, low), 0),
        tl.min(tl.where(misses, b_threshold, high), 0),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _bracket_kernel(
    settings: tl.tensor,
    best: tl.tensor,
    known: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NTH: tl.constexpr,
) -> None:
    """Find a bracket of the end of a row's nucleus before a pass: one program a row."""
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(settings + 3 * num_rows + row)
    if NTH == 0:
        likeliest, _ = best_of(best, row, S, BLOCK_S)
        inverse = likeliest * 0
        if wants_nucleus(settings, row, num_rows) & (tl.abs(likeliest) < float("inf")):
            temperature = tl.maximum(tl.load(settings + row), _COLDEST)
            inverse = (1.4426950408889634 / temperature).to(tl.float32)
        # Weights below are together less than what may be left out: the likeliest alone is 1.
        low = tl.log2(((1 - top_p) / V).to(tl.float32)) - 1
        tl.store(known + _LIKELIEST * num_rows + row, likeliest)
        tl.store(known + _INVERSE * num_rows + row, inverse)
        tl.store(known + _LOW * num_rows + row, tl.maximum(low, _LOWEST))
        tl.store(known + _HIGH * num_rows + row, 0.0)
    else:
        wanted = tl.load(known + _WANTED * num_rows + row)
        if NTH == 1:  # the first sum of the first pass is of all
            wanted = tl.max(_sums_of(sums, row, S, BLOCK_S), 0) * top_p.to(tl.float32)
            tl.store(known + _WANTED * num_rows + row, wanted)
        low, high = _narrowed(known, sums, wanted, row, num_rows, S, BLOCK_S)
        if tl.load(settings + row) > _COLDEST:  # else logits are too close to be told apart
            tl.store(known + _LOW * num_rows + row, low)
            tl.store(known + _HIGH * num_rows + row, high)


@triton.jit
def _above(
    b_scaled: tl.tensor, b_w: tl.tensor, low: tl.tensor, high: tl.tensor, NTH: tl.constexpr
) -> tl.tensor:
    return tl.where(b_scaled >= _threshold(low, high, NTH), b_w, 0.0)


@triton.jit
def _pair_above(
    b_scaled: tl.tensor, b_w: tl.tensor, low: tl.tensor, high: tl.tensor, NTH: tl.constexpr
) -> tl.tensor:
    """Add above this threshold and the one four later, in the registers of one thread."""
    return tl.join(
        _above(b_scaled, b_w, low, high, NTH), _above(b_scaled, b_w, low, high, NTH + 4.0)
    )


@triton.jit(do_not_specialize=["num_rows"])
def _sums_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    known: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    IS_FIRST: tl.constexpr,
) -> None:
    """Add what of a segment is above each threshold of this pass: one program a segment."""
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    token = segment * SEGMENT + tl.arange(0, SEGMENT)
    inverse = tl.load(known + _INVERSE * num_rows + row)
    if inverse > 0:
        b_x = tl.load(logits + row * stride + token, mask=token < V, other=-float("inf"))
        likeliest = tl.load(known + _LIKELIEST * num_rows + row)
        low = tl.load(known + _LOW * num_rows + row)
        high = tl.load(known + _HIGH * num_rows + row)
        own = (logit_of(tl.load(best + row * S + segment)) - likeliest) * inverse
        place = sums + (row * S + segment) * _TRIES
        if IS_FIRST | (own >= low):
            b_scaled = (b_x.to(tl.float32) - likeliest) * inverse
            b_w = tl.exp2(b_scaled)
            # One sum of all thresholds, each element of which one thread has: what is joined last
            # is the lowest bit of a threshold's number.
            b_first = _pair_above(b_scaled, b_w, low, high, 0.0)
            if IS_FIRST:
                b_first = tl.join(b_w, _above(b_scaled, b_w, low, high, 4.0))
            b_even = tl.join(b_first, _pair_above(b_scaled, b_w, low, high, 2.0))
            b_odd = tl.join(
                _pair_above(b_scaled, b_w, low, high, 1.0),
                _pair_above(b_scaled, b_w, low, high, 3.0),
            )
            b_sum = tl.reshape(tl.sum(tl.join(b_even, b_odd), 0), [_TRIES])
            tl.store(place + tl.arange(0, _TRIES), b_sum)
        else:
            tl.store(place + tl.arange(0, _TRIES), tl.zeros([_TRIES], tl.float32))
