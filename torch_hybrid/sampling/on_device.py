"""The draw of a token for each row, with nothing read on the host and shapes that no value changes.

It is captured with the step whose logits it draws from. It keeps and draws the same tokens as
``draw``, which looks at a few candidates, and at more where those do not suffice:

    top-k    the weight of the k-th likeliest token, by one topk for all rows
    top-p    the weight at which the nucleus ends: among the k likeliest where there is a top-k;
             otherwise by two histograms of the weights' bits, as it may have any number of tokens
    min-p    is a weight
    draw     from all tokens of at least the largest of those weights
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from torch_hybrid.sampling.counts import as_counts, draw_from, nucleus_mass
from torch_hybrid.sampling.draw import NOT_FINITE, Draw, weights_of

_NUM_SETTINGS = 5
_FEWEST_RANKED = 64
# Weights are floats within 0 and 1: as integers they are in order, and have 30 bits.
_HALF_BITS = 15
_LOW_BITS = (1 << _HALF_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawKind:
    """What the rows of one step ask for: what is done for none of them is left out."""

    draws: bool = False  # some temperature is above 0
    num_ranked: int = 0  # at least the largest top-k
    has_wide_top_p: bool = False  # some row has a top-p and no top-k

    @classmethod
    def of(cls, draws: Sequence[Draw | None]) -> DrawKind:
        """The kind of a step that draws these."""
        drawn = [x.sampling for x in draws if x is not None and x.sampling.temperature > 0]
        top_k = max((sampling.top_k for sampling in drawn), default=0)
        return cls(
            draws=bool(drawn),
            num_ranked=max(1 << (top_k - 1).bit_length(), _FEWEST_RANKED) if top_k else 0,
            has_wide_top_p=any(s.top_p < 1 and not s.top_k for s in drawn),
        )

    def __str__(self) -> str:
        """As it stands in reports."""
        if not self.draws:
            return "greedy"
        filters = ["top-k"] * (self.num_ranked > 0) + ["top-p"] * self.has_wide_top_p
        return " ".join(["drawn", *filters])


def settings_of(draws: Sequence[Draw | None], num_rows: int) -> Tensor:
    """[5, num_rows] float64 on the host: temperature, number, top-k, top-p and min-p of each row.

    Rows without a draw, and those behind the last, are all zero.
    """
    rows = [_NOTHING if draw is None else _settings(draw) for draw in draws]
    rows += [_NOTHING] * (num_rows - len(rows))
    packed = array("d", chain.from_iterable(zip(*rows, strict=True)))
    return torch.frombuffer(packed, dtype=torch.float64).view(_NUM_SETTINGS, num_rows)


_NOTHING = (0.0,) * _NUM_SETTINGS


def _settings(draw: Draw) -> tuple[float, ...]:
    sampling = draw.sampling
    top_k = float(sampling.top_k)
    return sampling.temperature, draw.number, top_k, sampling.top_p, sampling.min_p


def no_settings(num_rows: int) -> Tensor:
    """The settings of rows of which none is drawn."""
    return torch.zeros(_NUM_SETTINGS, num_rows, dtype=torch.float64, device="cpu")


def draw_tokens(logits: Tensor, settings: Tensor, kind: DrawKind) -> Tensor:
    """Choose a token for each row.

    Args:
        logits: [N, vocab], any float dtype; not changed.
        settings: [5, N] float64, of ``settings_of``.
        kind: of the rows that are drawn; others may hold anything.

    Returns:
        [N] int64 token ids; ``NOT_FINITE`` for a row with NaN or infinity among its logits.
    """
    likeliest, tokens = logits.max(dim=-1)  # NaN wins every comparison, so it surfaces here
    if kind.draws:
        drawn = _drawn(logits, likeliest.unsqueeze(-1), settings.unsqueeze(-1), kind)
        tokens = torch.where(settings[0] > 0, drawn, tokens)
    return torch.where(likeliest.abs() < math.inf, tokens, NOT_FINITE)


def _drawn(logits: Tensor, likeliest: Tensor, settings: Tensor, kind: DrawKind) -> Tensor:
    temperature, number, top_k, top_p, min_p = settings.unbind()  # [N, 1] each
    weights = weights_of(logits, likeliest, temperature.where(temperature > 0, 1.0))
    ranked = kth = weights[:, :0]
    if kind.num_ranked:
        ranked, kth = _ranked(weights, logits, top_k, kind.num_ranked)
        weights.masked_fill_(weights < kth, 0)
    counts = as_counts(weights)
    least = min_p
    if kind.num_ranked or kind.has_wide_top_p:
        wanted = nucleus_mass(counts.sum(dim=-1, keepdim=True), top_p)
        end = torch.zeros_like(top_p)
        if kind.has_wide_top_p:
            end = _nucleus_end(weights, counts, wanted)
        if kind.num_ranked:
            end = torch.where(top_k > 0, _nucleus_end_of_ranked(ranked, kth, wanted), end)
        least = torch.maximum(least, end.where(top_p < 1, 0.0))
    counts.masked_fill_(weights < least, 0)
    return draw_from(counts, number)


def _ranked(
    weights: Tensor, logits: Tensor, top_k: Tensor, num_ranked: int
) -> tuple[Tensor, Tensor]:
    """Weights of the likeliest tokens, descending, and [N, 1] that of the k-th; 0 where all tokens
    are kept."""
    _, ids = logits.topk(min(num_ranked, logits.shape[-1]))
    ranked = weights.gather(-1, ids)
    place = (top_k.long() - 1).clamp(min=0, max=ranked.shape[-1] - 1)
    return ranked, ranked.gather(-1, place).where(top_k > 0, 0.0)


def _nucleus_end_of_ranked(ranked: Tensor, kth: Tensor, wanted: Tensor) -> Tensor:
    """As ``_nucleus_end``, of rows with a top-k.

    However many tokens tie with the k-th likeliest, those above it are ranked: the nucleus ends
    among them or at the k-th itself.
    """
    reached = as_counts(ranked.masked_fill(ranked <= kth, 0)).cumsum(dim=-1)
    num_before = (reached < wanted).sum(dim=-1, keepdim=True)
    last = ranked.shape[-1] - 1
    return torch.where(num_before > last, kth, ranked.gather(-1, num_before.clamp(max=last)))


def _nucleus_end(weights: Tensor, counts: Tensor, wanted: Tensor) -> Tensor:
    """[N, 1] the largest weight such that all of at least it count ``wanted`` together.

    The upper half of its bits is found among the counts by upper halves, then the lower one among
    those that have this upper half.
    """
    bits = weights.nan_to_num(0.0).view(torch.int32).long()  # NaN: of rows that are not finite
    spread = torch.arange(bits.shape[-1], dtype=torch.int64, device=bits.device) & _LOW_BITS
    # What counts nothing may stand anywhere: all in one place, they would wait for each other.
    upper = torch.where(counts > 0, bits >> _HALF_BITS, spread)
    high, above = _crossing(upper, counts, wanted)
    inside = counts.masked_fill(upper != high, 0)
    low, _ = _crossing(bits & _LOW_BITS, inside, wanted - above)
    return (high << _HALF_BITS | low).int().view(torch.float32)


def _crossing(places: Tensor, counts: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The last of the places from which on to the end there is ``wanted``, and what is behind it.

    Args:
        places: [N, M] of each count.
        counts: [N, M].
        wanted: [N, 1], at most the sum.
    """
    histogram = counts.new_zeros(counts.shape[0], 1 << _HALF_BITS).scatter_add_(1, places, counts)
    from_here = histogram.flip(1).cumsum(1).flip(1)
    # Rows that are not finite count anything, and must not read beyond.
    place = ((from_here >= wanted).sum(dim=1, keepdim=True) - 1).clamp_(min=0)
    return place, (from_here - histogram).gather(1, place)
