"""Implementation "torch": with nothing read on the host and shapes that no value changes.

top-k    the weight of the k-th likeliest token, by one topk for all rows
top-p    the weight at which the nucleus ends: among the k likeliest where there is a top-k;
         otherwise by histograms of the weights' bits, as it may have any number of tokens
min-p    is a weight
draw     from all tokens of at least the largest of those weights
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.draw_tokens.counts import (
    NOT_FINITE,
    as_counts,
    draw_from,
    nucleus_mass,
    weights_of,
)
from torch_hybrid.ops.draw_tokens.op import DrawTokens

# Weights are floats within 0 and 1: as integers they are in order, and have 30 bits.
_WEIGHT_BITS = 30
_FEWEST_BITS, _MOST_BITS = 5, 15  # that one histogram tells apart


def draw_tokens(x: DrawTokens) -> Tensor:
    """Draw, or take the likeliest token of rows without a temperature."""
    likeliest, tokens = x.logits.max(dim=-1)  # NaN wins every comparison, so it surfaces here
    if x.draws:
        drawn = _drawn(x, likeliest.unsqueeze(-1))
        tokens = torch.where(x.settings[0] > 0, drawn, tokens)
    return torch.where(likeliest.abs() < math.inf, tokens, NOT_FINITE)


def _drawn(x: DrawTokens, likeliest: Tensor) -> Tensor:
    temperature, number, top_k, top_p, min_p = x.settings.unsqueeze(-1).unbind()  # [N, 1] each
    weights = weights_of(x.logits, likeliest, temperature.where(temperature > 0, 1.0))
    ranked = kth = weights[:, :0]
    if x.num_ranked:
        ranked, kth = _ranked(weights, x.logits, top_k, x.num_ranked)
        weights.masked_fill_(weights < kth, 0)
    counts = as_counts(weights)
    least = min_p
    if x.num_ranked or x.has_wide_top_p:
        wanted = nucleus_mass(counts.sum(dim=-1, keepdim=True), top_p)
        end = torch.zeros_like(top_p)
        if x.has_wide_top_p:
            end = _nucleus_end(weights, counts, wanted)
        if x.num_ranked:
            end = torch.where(top_k > 0, _nucleus_end_of_ranked(ranked, kth, wanted), end)
        least = torch.maximum(least, end.where(top_p < 1, 0.0))
    counts.masked_fill_(weights < least, 0)
    return draw_from(counts, number)


def _ranked(
    weights: Tensor, logits: Tensor, top_k: Tensor, num_ranked: int
) -> tuple[Tensor, Tensor]:
    """Return the weights of the likeliest tokens, descending, and [N, 1] that of the k-th.

    The latter is 0 where all tokens are kept.
    """
    _, ids = logits.topk(min(num_ranked, logits.shape[-1]))
    ranked = weights.gather(-1, ids)
    place = (top_k.long() - 1).clamp(min=0, max=ranked.shape[-1] - 1)
    return ranked, ranked.gather(-1, place).where(top_k > 0, 0.0)


def _nucleus_end_of_ranked(ranked: Tensor, kth: Tensor, wanted: Tensor) -> Tensor:
    """Find what ``_nucleus_end`` does, of rows with a top-k.

    However many tokens tie with the k-th likeliest, those above it are ranked: the nucleus ends
    among them or at the k-th itself.
    """
    reached = as_counts(ranked.masked_fill(ranked <= kth, 0)).cumsum(dim=-1)
    num_before = (reached < wanted).sum(dim=-1, keepdim=True)
    last = ranked.shape[-1] - 1
    return torch.where(num_before > last, kth, ranked.gather(-1, num_before.clamp(max=last)))


def _nucleus_end(weights: Tensor, counts: Tensor, wanted: Tensor) -> Tensor:
    """Find [N, 1] the largest weight such that all of at least it count ``wanted`` together.

    A histogram of the counts finds its uppermost bits; the next ones are found among the counts
    that have those. A histogram has about as many places as a row has tokens.
    """
    bits = weights.nan_to_num(0.0).view(torch.int32).long()  # NaN: of rows that are not finite
    width = _histogram_bits(bits.shape[-1])
    # What counts nothing may stand anywhere: all in one place, they would wait for each other.
    spread = torch.arange(bits.shape[-1], dtype=torch.int64, device=bits.device)
    end = torch.zeros_like(wanted)
    for shift in reversed(range(0, _WEIGHT_BITS, width)):
        places = torch.where(counts > 0, bits >> shift, spread) & ((1 << width) - 1)
        place, above = _crossing(places, counts, wanted, 1 << width)
        counts = counts.masked_fill(places != place, 0)
        wanted = wanted - above
        end = end | place << shift
    return end.int().view(torch.float32)


def _histogram_bits(vocab_size: int) -> int:
    """Choose the bits that one histogram tells apart: the fewest that need no more histograms."""
    most = min(max(vocab_size.bit_length(), _FEWEST_BITS), _MOST_BITS)
    return math.ceil(_WEIGHT_BITS / math.ceil(_WEIGHT_BITS / most))


def _crossing(
    places: Tensor, counts: Tensor, wanted: Tensor, num_places: int
) -> tuple[Tensor, Tensor]:
    """Find the last place from which to the end there is ``wanted``, and what is behind it.

    Args:
        places: [N, M] of each count.
        counts: [N, M].
        wanted: [N, 1], at most the sum.
        num_places: that there are.
    """
    histogram = counts.new_zeros(counts.shape[0], num_places).scatter_add_(1, places, counts)
    from_here = histogram.flip(1).cumsum(1).flip(1)
    # Rows that are not finite count anything, and must not read beyond.
    place = ((from_here >= wanted).sum(dim=1, keepdim=True) - 1).clamp_(min=0)
    return place, (from_here - histogram).gather(1, place)
