"""route: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS
from torch_hybrid.ops.core.declare import NO_DEFAULT, Dense, Op, Strided, define, pair_made
from torch_hybrid.ops.implementations import in_torch, in_triton

SCORES = ("softmax", "sigmoid")

IMPLEMENTATIONS = {
    "triton": in_triton(
        "torch_hybrid.ops.route._triton:route",
        limits={"num_experts": 1024, "k": 32, "num_groups": 32},
    ),
    "torch": in_torch("torch_hybrid.ops.route._torch:route", cuda_graph=True),
}


@dataclass(slots=True, repr=False, eq=False)
class Route(Op):
    """Best k experts of each token, the best first, and their weights.

    Experts have scores, a softmax or sigmoids of the logits in float32. Those with the largest
    scores, ``bias`` added, are chosen, the first of equal ones; weights are the bare scores. With
    groups, they are chosen within the groups whose two best have the largest sums (DeepSeek-V3,
    arXiv 2412.19437).

    Args:
        logits: [T, E] float32, bfloat16 or float16.
        bias: [E] float32, contiguous, added to scores for the choice alone; or None.
        k: at least 1, at most the experts of the best groups.
        score: "softmax" or "sigmoid".
        num_groups: equal parts of the E experts, of at least two each unless it is 1.
        num_best_groups: so many of them are chosen from.
        renormalise: divide by the sum of the k scores, ``epsilon`` added.
        epsilon: see there.
        scale: of the weights.
        dtype: of the weights; they are computed in float32.

    Returns:
        Weights [T, k] and expert ids [T, k] int64. Of a token with NaN among its logits they have
        no meaning, but for ids that are experts.
    """

    logits: Annotated[Tensor, Strided("T", "E")]
    bias: Annotated[Tensor | None, Dense("E", dtype=torch.float32)]
    k: int
    score: str = field(kw_only=True)
    num_groups: Annotated[int, NO_DEFAULT] = field(default=1, kw_only=True)
    num_best_groups: Annotated[int, NO_DEFAULT] = field(default=1, kw_only=True)
    renormalise: Annotated[bool, NO_DEFAULT] = field(default=True, kw_only=True)
    epsilon: Annotated[float, NO_DEFAULT] = field(default=0.0, kw_only=True)
    scale: Annotated[float, NO_DEFAULT] = field(default=1.0, kw_only=True)
    dtype: Annotated[torch.dtype, NO_DEFAULT] = field(default=torch.float32, kw_only=True)

    def check_form(self) -> None:
        """Raise ValueError unless there are logits of each token."""
        if self.logits.dim() != 2 or self.logits.dtype not in FLOATS:
            raise ValueError(
                f"logits must be [T, E] of floating point, got {list(self.logits.shape)} of "
                f"{self.logits.dtype}"
            )

    def check(self) -> None:
        """Raise ValueError for options that are none, and for more experts than there are."""
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {list(SCORES)}, got {self.score!r}")
        if self.dtype not in FLOATS:
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype}")
        _check_groups(self.logits.shape[1], self.num_groups, self.num_best_groups, self.k)

    def empty(self) -> tuple[Tensor, Tensor]:
        """Make the results, not filled yet."""
        shape = (self.logits.shape[0], self.k)
        weights = self.logits.new_empty(shape, dtype=self.dtype)
        return weights, self.logits.new_empty(shape, dtype=torch.int64)


def _check_groups(num_experts: int, num_groups: int, num_best_groups: int, k: int) -> None:
    if (
        num_groups < 1
        or num_experts % num_groups
        or (num_groups > 1 and num_experts < 2 * num_groups)
    ):
        raise ValueError(
            f"num_groups must be equal parts of {num_experts} experts, of two at least, "
            f"got {num_groups}"
        )
    if not 1 <= num_best_groups <= num_groups:
        raise ValueError(
            f"num_best_groups must be within 1 and {num_groups}, got {num_best_groups}"
        )
    eligible = num_best_groups * (num_experts // num_groups)
    if not 1 <= k <= eligible:
        raise ValueError(f"k must be within 1 and {eligible}, got {k}")


route = define(
    Route,
    IMPLEMENTATIONS,
    returns=pair_made(Route.empty),
    limited={"num_experts": "E", "k": "k", "num_groups": "num_groups"},
)
ROUTE: torch._ops.OpOverload = torch.ops.torch_hybrid.route.default
