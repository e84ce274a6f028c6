"""How likely the model found tokens: natural logarithms, from its own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, how likely it was, and the likeliest ones in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # token ids and log-probabilities, likeliest first


def logprobs_of(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of one token for each row.

    Args:
        logits: [R, vocab_size], any float dtype; the model's own.
        tokens: R of them.
        num_top: so many of the likeliest are listed beside each; at most the vocabulary.
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
