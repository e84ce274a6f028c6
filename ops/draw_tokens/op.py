"""Draw of a token for each row of logits, by sums that no order of adding changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS
from torch_hybrid.ops.core.declare import Op, Strided, define, made
from torch_hybrid.ops.implementations import in_torch, in_triton

NUM_SETTINGS = 5

_LARGEST_VOCAB = 1 << 18  # that the kernels which draw are made for
IMPLEMENTATIONS = {
    "triton": in_triton(
        "torch_hybrid.ops.draw_tokens._triton:draw_tokens", limits={"vocab_size": _LARGEST_VOCAB}
    ),
    "torch": in_torch("torch_hybrid.ops.draw_tokens._torch:draw_tokens", cuda_graph=True),
}


@dataclass(slots=True, repr=False, eq=False)
class DrawTokens(Op):
    """Choice of a token for each row of logits; nothing is read on the host.

    The filters keep what transformers' logits processors keep, in their order: temperature, top-k,
    top-p, min-p. Tokens that tie with the last one kept are kept too. The token is the one at which
    the running sum of what is left, in the order of ids, passes ``number``; sums are of integers,
    so that no order of adding changes them. Ties of the likeliest are the first of them.

    Args:
        logits: [N, vocab_size] float32, bfloat16 or float16; not changed.
        settings: [5, N] float64, for each row: temperature (0: the likeliest token), number (in
            [0, 1)), top-k (0: all tokens), top-p (1: all) and min-p (0: all).
        draws: some temperature is above 0.
        num_ranked: at least the largest top-k of rows that draw, or so many as there are tokens; 0
            where there is none.
        has_wide_top_p: some row that draws has a top-p below 1 and no top-k.

    Returns:
        [N] int64 token ids; -1 for a row with NaN or infinity among its logits (minus infinity
        bars a token and is allowed beside finite ones).
    """

    logits: Annotated[Tensor, Strided("N", "V")]
    settings: Annotated[Tensor, Strided(f"{NUM_SETTINGS}", "N", dtype=torch.float64)]
    draws: bool = field(kw_only=True)
    num_ranked: int = field(kw_only=True)
    has_wide_top_p: bool = field(kw_only=True)

    def check_form(self) -> None:
        """Raise ValueError unless there are tokens to choose from."""
        if self.logits.dim() != 2 or not self.logits.shape[1]:
            raise ValueError(f"logits must be [N, vocab_size], got {list(self.logits.shape)}")

    def check(self) -> None:
        """Raise ValueError for a number of ranked tokens below 0."""
        if self.num_ranked < 0:
            raise ValueError(f"num_ranked must be at least 0, got {self.num_ranked}")


def _empty_tokens(x: DrawTokens) -> Tensor:
    return x.logits.new_empty(x.logits.shape[:1], dtype=torch.int64)


draw_tokens = define(
    DrawTokens,
    IMPLEMENTATIONS,
    returns=made(_empty_tokens),
    limited={"vocab_size": "V"},
    floats=FLOATS,
)
