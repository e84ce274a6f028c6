"""Log-probabilities of tokens in torch, a chunk of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.token_logprobs.op import TokenLogprobsBackward, TokenLogprobsForward
from torch_hybrid.ops.token_logprobs.rows import log_softmax

_ROWS = 256  # of a chunk, whose log-probabilities exist at once
_CACHED = 2**19  # logits on a CPU whose log-probabilities stay in the cache


def token_logprobs_forward(x: TokenLogprobsForward) -> Tensor:
    """Pick log-probabilities."""
    out, tokens = x.empty(), x.token_ids.unsqueeze(-1)
    for made, logits, token in zip(*_chunks(out, x.logits, tokens), strict=True):
        made.copy_(log_softmax(logits).gather(-1, token).squeeze(-1))
    return out


def token_logprobs_backward(x: TokenLogprobsBackward) -> Tensor:
    """Make the gradient of logits."""
    out, given = x.empty(), x.dlogprobs.unsqueeze(-1)
    for made, logits, token, d in zip(
        *_chunks(out, x.logits, x.token_ids.unsqueeze(-1), given), strict=True
    ):
        shares = log_softmax(logits).exp_().mul_(-d)
        made.copy_(shares.scatter_add_(-1, token, d))
    return out


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    rows, logits = _ROWS, tensors[1]
    if logits.device.type == "cpu":
        rows = min(rows, max(1, _CACHED // max(1, logits.shape[1])))
    return [torch.split(each, rows) for each in tensors]
