"""Log-probabilities of tokens: natural logarithms, from the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.ops.token_logprobs import log_softmax, token_logprobs_forward


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token, and those of the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # token ids and log-probabilities, likeliest first


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute the log-probability of one token per row, as a server reports it, bit for bit.

    Of logits of the same bits, however many rows there are. It can be differentiated.

    Args:
        logits: [T, vocab_size], any float dtype; the model's own, whatever the temperature.
        tokens: [T] int64, on their device.

    Returns:
        [T] float32.

    Raises:
        ValueError: shapes or a dtype are not as above, or a token is not in the vocabulary (on a
            GPU the device fails).
    """
    made: Tensor = token_logprobs_forward(logits, tokens, impl="torch")
    return made


def logprobs_of(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Compute the log-probability of one token per row, and the likeliest tokens of the row.

    Args:
        logits: [R, vocab_size], any float dtype; the model's own.
        tokens: R tokens.
        num_top: number of likeliest tokens to list for each row; at most the vocabulary.
    """
    if not tokens:
        return []
    logprobs = log_softmax(logits)
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    own = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).tolist()
    best, best_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    tops = zip(best_ids.tolist(), best.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(top_ids, top, strict=True)))
        for token, logprob, (top_ids, top) in zip(tokens, own, tops, strict=True)
    ]
