"""token_logprobs: the declarations of its forward and its backward.

An op, so that a graph around it computes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import Dense, Op, Rows, define, made
from torch_hybrid.ops.implementations import in_torch


def _by_torch(launcher: str) -> dict[str, Implementation]:
    path = f"torch_hybrid.ops.token_logprobs._torch:{launcher}"
    return {"torch": in_torch(path, dtypes=FLOATS_AND_FLOAT64, cuda_graph=True)}


@dataclass(slots=True, repr=False, eq=False)
class TokenLogprobsForward(Op):
    """Log-probability of one token per row: the same bits however many rows there are.

    Args:
        logits: [T, V], float dtype.
        token_ids: [T] int64 from 0 to V - 1.

    Returns:
        [T] float32, of float64 logits float64.
    """

    logits: Annotated[Tensor, Rows("V")]
    token_ids: Annotated[Tensor, Dense("T", dtype=torch.int64)]

    def check_indices(self) -> None:
        """Raise ValueError for a token that is not in the vocabulary."""
        size = self.logits.shape[1]
        if self.token_ids.numel() and (self.token_ids.min() < 0 or self.token_ids.max() >= size):
            came = [int(self.token_ids.min()), int(self.token_ids.max())]
            raise ValueError(f"token_ids must be from 0 to {size - 1}, got {came}")

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        work = torch.promote_types(self.logits.dtype, torch.float32)
        return self.logits.new_empty(self.logits.shape[:1], dtype=work)


@dataclass(slots=True, repr=False, eq=False)
class TokenLogprobsBackward(TokenLogprobsForward):
    """Gradient of logits: ``d (onehot(token) - softmax(logits))`` for each row.

    Args:
        logits: [T, V]. token_ids: [T] int64. As of the forward.
        dlogprobs: [T] float32 gradient of what it returned.

    Returns:
        [T, V] in the dtype of ``logits``.
    """

    dlogprobs: Annotated[Tensor, Dense("T", dtype="work")]

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        return self.logits.new_empty(self.logits.shape)


token_logprobs_backward = define(
    TokenLogprobsBackward,
    _by_torch("token_logprobs_backward"),
    returns=made(TokenLogprobsBackward.empty),
)


def _gradients(ctx: Any, dlogprobs: Tensor) -> tuple[Tensor, None]:
    logits, token_ids = ctx.saved_tensors
    impl = ctx.options["impl"]
    return token_logprobs_backward(logits, token_ids, dlogprobs.contiguous(), impl=impl), None


token_logprobs_forward = define(
    TokenLogprobsForward,
    _by_torch("token_logprobs_forward"),
    returns=made(TokenLogprobsForward.empty),
    backward=_gradients,
)
