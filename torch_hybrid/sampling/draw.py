"""Draw of tokens on the host, one for each row of a batch.

The filters keep the same tokens as transformers' logits processors, in their order: temperature,
top-k, top-p, min-p. Tokens that tie with the last one kept are kept too. A request has its own
random number for each token (``numbers``): the draw depends only on its row of logits and its seed.
The row itself may differ in its last bits with the size and the cut of the batch (see ``Runner``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.ops.draw_tokens.counts import (
    NOT_FINITE,
    as_counts,
    draw_from,
    nucleus_mass,
    weights_of,
)
from torch_hybrid.sampling.parameters import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """Options and random number of one draw; ``number``, in [0, 1), needs a temperature above 0."""

    sampling: Sampling
    number: float = 0.0


def sample_on_host(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose a token for each row, on the host.

    Args:
        logits: [N, vocab], any float dtype; not changed.
        draws: N draws.

    Returns:
        N token ids; ``NOT_FINITE`` for a row with NaN or infinity among its logits. Minus infinity
        bars a token, and is allowed beside finite ones.
    """
    likeliest, token_ids = logits.max(dim=-1)  # NaN wins every comparison, so it surfaces here
    tokens: list[int] = token_ids.tolist()
    for row, best in enumerate(likeliest.tolist()):
        if not math.isfinite(best):
            tokens[row] = NOT_FINITE
    drawn = [
        row
        for row, draw in enumerate(draws)
        if draw.sampling.temperature > 0 and tokens[row] != NOT_FINITE
    ]
    for rows in _split(drawn, [draw.sampling for draw in draws]):
        weights, ids = candidates(logits[rows], [draws[row].sampling for row in rows])
        numbers = _column([draws[row].number for row in rows], logits)
        chosen = draw_from(as_counts(weights), numbers)
        for row, token in zip(rows, ids.gather(-1, chosen.unsqueeze(-1)).tolist(), strict=True):
            tokens[row] = token[0]
    return tokens


def _split(rows: list[int], samplings: Sequence[Sampling]) -> list[list[int]]:
    """Split rows into those with a filter and those without, which need the whole vocabulary."""
    groups = (
        [row for row in rows if samplings[row].filters],
        [row for row in rows if not samplings[row].filters],
    )
    return [group for group in groups if group]


def candidates(logits: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Find the tokens that each row is drawn from, with their weights.

    Args:
        logits: [N, vocab], finite but for barred tokens.
        samplings: N of them, with temperatures above 0; all of them filter or none does.

    Returns:
        weights [N, M], in proportion to the probabilities (0: filtered out), and their token ids
        [N, M], ascending, so that the draw depends on the set of tokens alone.
    """
    temperature = _column([sampling.temperature for sampling in samplings], logits)
    if not samplings[0].filters:
        weights = weights_of(logits, logits.amax(dim=-1, keepdim=True), temperature)
        ids = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device)
        return weights, ids.expand_as(weights)

    vocab = logits.shape[-1]
    num_ranked = 2 * max(128, *(sampling.top_k for sampling in samplings))
    while True:  # a few hundred tokens nearly always hold all that are kept
        num_ranked = min(num_ranked, vocab)
        ranked, ids = logits.topk(num_ranked)
        weights = weights_of(ranked, ranked[:, :1], temperature)
        total = _totals(logits, ranked[:, :1], temperature, samplings)
        least = _least_kept(weights, total, samplings)
        if num_ranked == vocab or bool((weights[:, -1:] < least).all()):
            break
        num_ranked *= 16
    weights.masked_fill_(weights < least, 0)
    ids, order = ids.sort(dim=-1)
    return weights.gather(-1, order), ids


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Make a column [N, 1] of float64."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _totals(
    logits: Tensor, best: Tensor, temperature: Tensor, samplings: Sequence[Sampling]
) -> Tensor:
    """Sum the counts of rows with a top-p and no top-k over the vocabulary [N, 1]; 0 elsewhere."""
    total = torch.zeros(len(samplings), 1, dtype=torch.int64, device=logits.device)
    rows = [row for row, s in enumerate(samplings) if s.top_p < 1 and not s.top_k]
    if rows:
        weights = weights_of(logits[rows], best[rows], temperature[rows])
        total[rows] = as_counts(weights).sum(dim=-1, keepdim=True)
    return total


def _least_kept(weights: Tensor, total: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Find the weight below which the filters drop a token.

    Args:
        weights: [N, M] descending: the M likeliest tokens.
        total: [N, 1] count over the vocabulary, for rows with a top-p and no top-k.
        samplings: N of them.
    """
    last = [min(sampling.top_k or 1, weights.shape[-1]) - 1 for sampling in samplings]
    places = torch.tensor(last, dtype=torch.int64, device=weights.device).unsqueeze(-1)
    kth = weights.gather(-1, places)
    has_top_k = _column([sampling.top_k for sampling in samplings], weights) > 0
    kth = kth.where(has_top_k, 0.0)

    reached = as_counts(weights.masked_fill(weights < kth, 0)).cumsum(dim=-1)
    total = reached[:, -1:].where(has_top_k, total)
    top_p = _column([sampling.top_p for sampling in samplings], weights)
    num_before = (reached < nucleus_mass(total, top_p)).sum(dim=-1, keepdim=True)
    end = num_before.clamp(max=weights.shape[-1] - 1)
    nucleus = weights.gather(-1, end).where(top_p < 1, 0.0)

    min_p = _column([sampling.min_p for sampling in samplings], weights)
    return torch.maximum(torch.maximum(kth, nucleus), min_p)
