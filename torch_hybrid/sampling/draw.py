"""The draw of a token for each row of a batch.

The filters keep what transformers' logits processors keep, in their order: temperature, top-k,
top-p, min-p. Tokens that tie with the last one kept are kept too. A request draws one number for
each token from its own generator, so the draw depends on its own row of logits and its own seed.
The row itself may differ in its last bits with the size and the cut of the batch (see ``Runner``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.sampling.parameters import Sampling

NOT_FINITE = -1


def sample(
    logits: Tensor,
    samplings: Sequence[Sampling],
    generators: Sequence[torch.Generator | None],
) -> list[int]:
    """Choose a token for each row.

    Args:
        logits: [N, vocab], any float dtype; not changed.
        samplings: N of them.
        generators: N, from ``Sampling.make_generator``; each is advanced by one number.

    Returns:
        N token ids; ``NOT_FINITE`` for a row with NaN or infinity among its logits (minus
        infinity bars a token and is allowed beside finite ones).
    """
    likeliest, token_ids = logits.max(dim=-1)  # NaN wins every comparison, so it surfaces here
    tokens: list[int] = token_ids.tolist()
    for row, best in enumerate(likeliest.tolist()):
        if not math.isfinite(best):
            tokens[row] = NOT_FINITE
    drawn = [
        row
        for row, generator in enumerate(generators)
        if generator is not None and tokens[row] != NOT_FINITE
    ]
    for rows in _split(drawn, samplings):
        weights, ids = candidates(logits[rows], [samplings[row] for row in rows])
        numbers = [_number(generators[row]) for row in rows]
        for row, token in zip(rows, _draw(weights, ids, torch.stack(numbers)), strict=True):
            tokens[row] = token
    return tokens


def _number(generator: torch.Generator | None) -> Tensor:
    """The next random number, in [0, 1)."""
    return torch.rand((), dtype=torch.float64, device="cpu", generator=generator)


def _split(rows: list[int], samplings: Sequence[Sampling]) -> list[list[int]]:
    """Rows with a filter and rows without: the latter need the whole vocabulary."""
    groups = (
        [row for row in rows if samplings[row].filters],
        [row for row in rows if not samplings[row].filters],
    )
    return [group for group in groups if group]


def candidates(logits: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """The tokens that each row is drawn from.

    Args:
        logits: [N, vocab], finite but for barred tokens.
        samplings: N of them, with temperatures above 0; all of them filter or none does.

    Returns:
        weights [N, M], in proportion to the probabilities (0: filtered out), and their token ids
        [N, M], ascending, so that the draw depends on the set of tokens alone.
    """
    temperature = _column([sampling.temperature for sampling in samplings], logits)
    if not samplings[0].filters:
        weights = _weights(logits, logits.amax(dim=-1, keepdim=True), temperature)
        ids = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device)
        return weights, ids.expand_as(weights)

    vocab = logits.shape[-1]
    num_ranked = 2 * max(128, *(sampling.top_k for sampling in samplings))
    while True:  # a few hundred tokens nearly always hold all that are kept
        num_ranked = min(num_ranked, vocab)
        ranked, ids = logits.topk(num_ranked)
        weights = _weights(ranked, ranked[:, :1], temperature)
        total = _totals(logits, ranked[:, :1], temperature, samplings)
        least = _least_kept(weights, total, samplings)
        if num_ranked == vocab or bool((weights[:, -1:] < least).all()):
            break
        num_ranked *= 16
    weights.masked_fill_(weights < least, 0)
    ids, order = ids.sort(dim=-1)
    return weights.gather(-1, order), ids


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _weights(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """exp(logits / temperature) in single precision, with the best token at 1."""
    return (logits.float() - best.float()).div_(temperature).exp_()


def _totals(
    logits: Tensor, best: Tensor, temperature: Tensor, samplings: Sequence[Sampling]
) -> Tensor:
    """Each row's sum of weights over the vocabulary; only a top-p without a top-k asks for it."""
    total = _column([0.0] * len(samplings), logits)
    rows = [row for row, s in enumerate(samplings) if s.top_p < 1 and not s.top_k]
    if rows:
        weights = _weights(logits[rows], best[rows], temperature[rows])
        total[rows] = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return total


def _least_kept(weights: Tensor, total: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The weight below which the filters drop a token.

    Args:
        weights: [N, M] descending: the M likeliest tokens.
        total: [N, 1] sum over the vocabulary, for rows with a top-p and no top-k.
        samplings: N of them.
    """
    last = [min(sampling.top_k or 1, weights.shape[-1]) - 1 for sampling in samplings]
    places = torch.tensor(last, dtype=torch.int64, device=weights.device).unsqueeze(-1)
    kth = weights.gather(-1, places)
    has_top_k = _column([sampling.top_k for sampling in samplings], weights) > 0
    kth = kth.where(has_top_k, 0.0)

    inside = weights.masked_fill(weights < kth, 0)
    reached = inside.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:].where(has_top_k, total)
    top_p = _column([sampling.top_p for sampling in samplings], weights)
    num_kept = (reached - inside < top_p * total).sum(dim=-1, keepdim=True).clamp(min=1)
    nucleus = weights.gather(-1, num_kept - 1).where(top_p < 1, 0.0)

    min_p = _column([sampling.min_p for sampling in samplings], weights)
    return torch.maximum(torch.maximum(kth, nucleus), min_p)


def _draw(weights: Tensor, ids: Tensor, numbers: Tensor) -> list[int]:
    """The token at which each row's running sum passes its number (in [0, 1), [N] float64)."""
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:]
    target = numbers.to(total).unsqueeze(-1) * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(reached, target, right=True)
    tokens: list[int] = ids.gather(-1, chosen).squeeze(-1).tolist()
    return tokens
