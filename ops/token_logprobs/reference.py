"""Mathematics of log-probabilities of tokens."""

from __future__ import annotations

from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute ``logits[t, tokens[t]] - log(sum(exp(logits[t])))`` [T] of logits [T, V]."""
    picked = logits.gather(1, tokens[:, None])[:, 0]
    return picked - logits.logsumexp(1)
