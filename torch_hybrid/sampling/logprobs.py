"""Log-probabilities of tokens: natural logarithms, from the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token, and those of the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # token ids and log-probabilities, likeliest first


def logprobs_of(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Compute the log-probability of one token per row, and the likeliest tokens of the row.

    Args:
        logits: [R, vocab_size], any float dtype; the model's own.
        tokens: R tokens.
        num_top: number of likeliest tokens to list for each row; at most the vocabulary.
    """
    if not tokens:
        return []
    logprobs = logits.float().log_softmax(dim=-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    own = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).tolist()
    best, best_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    tops = zip(best_ids.tolist(), best.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(top_ids, top, strict=True)))
        for token, logprob, (top_ids, top) in zip(tokens, own, tops, strict=True)
    ]
