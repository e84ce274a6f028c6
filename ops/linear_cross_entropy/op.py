"""Cross entropy of a head's logits that never exist whole: rows are taken a chunk at a time.

A chunk's logits give its loss and the gradients of hidden states and weights in the forward; the
backward scales them. So a step makes three products for each chunk, as with whole logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import Dense, Op, Rows, define, pair_made, several_made
from torch_hybrid.ops.implementations import in_cpp, in_torch

IGNORED = -100  # target of a row without a loss


_FOLDER = "torch_hybrid.ops.linear_cross_entropy"


def _by_torch(launcher: str) -> dict[str, Implementation]:
    path = f"{_FOLDER}._torch:{launcher}"
    return {"torch": in_torch(path, dtypes=FLOATS_AND_FLOAT64, cuda_graph=True)}


_CPP = in_cpp(f"{_FOLDER}._cpu:linear_cross_entropy_forward", checks_indices=False)


@dataclass(slots=True, repr=False, eq=False)
class LinearCrossEntropyForward(Op):
    """Sum of the cross entropies of rows, and its gradients.

    Logits have the dtype of ``hidden``; losses and sums are float32 at least.

    Args:
        hidden: [T, D], float dtype. weight [V, D] in that dtype.
        targets: [T] int64 from 0 to V - 1, or -100 for a row without a loss.
        of_hidden: whether the gradient of ``hidden`` is made.
        of_weight: whether that of ``weight`` is.
        softcap: bound of logits, which are ``softcap tanh(logits / softcap)``; None for none.

    Returns:
        The sum [] in float32, or float64 beside it; gradients [T, D] and [V, D], or [0].
    """

    hidden: Annotated[Tensor, Rows("D")]
    weight: Annotated[Tensor, Dense("V", "D")]
    targets: Annotated[Tensor, Dense("T", dtype=torch.int64)]
    of_hidden: bool = field(kw_only=True)
    of_weight: bool = field(kw_only=True)
    softcap: float | None = field(default=None, kw_only=True)

    def check_indices(self) -> None:
        """Raise ValueError for a target that is no row of ``weight``."""
        last = self.weight.shape[0] - 1
        kept = self.targets[self.targets != IGNORED]
        if kept.numel() and (kept.min() < 0 or kept.max() > last):
            came = [int(kept.min()), int(kept.max())]
            raise ValueError(f"targets must be {IGNORED} or from 0 to {last}, got {came}")


@dataclass(slots=True, repr=False, eq=False)
class LinearCrossEntropyBackward(Op):
    """Gradients that :func:`linear_cross_entropy_forward` made, scaled.

    Args:
        hidden: [T, D]. weight [V, D].
        dhidden: [T, D] or [0]. dweight [V, D] or [0].
        dtotal: [] gradient of the sum.

    Returns:
        Gradients of ``hidden`` and ``weight``, like ``dhidden`` and ``dweight``.
    """

    hidden: Annotated[Tensor, Rows("D")]
    weight: Annotated[Tensor, Dense("V", "D")]
    dhidden: Annotated[Tensor, Dense("...")]
    dweight: Annotated[Tensor, Dense("...")]
    dtotal: Annotated[Tensor, Dense("...", dtype="work")]


def empty_results(x: LinearCrossEntropyForward) -> tuple[Tensor, ...]:
    """Make the tensors that a forward returns."""
    total = x.hidden.new_empty((), dtype=torch.promote_types(x.hidden.dtype, torch.float32))
    dhidden = x.hidden.new_empty(x.hidden.shape if x.of_hidden else (0,))
    return total, dhidden, x.weight.new_empty(x.weight.shape if x.of_weight else (0,))


linear_cross_entropy_backward = define(
    LinearCrossEntropyBackward,
    _by_torch("linear_cross_entropy_backward"),
    returns=pair_made(lambda x: (torch.empty_like(x.dhidden), torch.empty_like(x.dweight))),
)


def _gradients(ctx: Any, dtotal: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    hidden, weight, _targets, _total, dhidden, dweight = ctx.saved_tensors
    asked = ctx.options
    dhidden, dweight = linear_cross_entropy_backward(
        hidden, weight, dhidden, dweight, dtotal, impl="torch"
    )
    return dhidden if asked["of_hidden"] else None, dweight if asked["of_weight"] else None, None


linear_cross_entropy_forward = define(
    LinearCrossEntropyForward,
    {"cpp": _CPP, **_by_torch("linear_cross_entropy_forward")},
    returns=several_made(3, empty_results),
    backward=_gradients,
    saves_results=1,
    flops="2 * T * D * V * (1 + x.of_hidden + x.of_weight)",
)
