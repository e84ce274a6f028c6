"""Mixers composed of several ops: which implementation each of these has, and what was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_hybrid.ops.core.declare import StatefulOp
from torch_hybrid.ops.core.registration import REGISTERED, first_impl
from torch_hybrid.ops.replay import Replay

COMPOSED = "composed"
S = TypeVar("S", bound=StatefulOp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Ops that "composed" calls.

    Attributes:
        impls: each op with its implementation.
        planned: what the planner of the first op made; empty where nothing was planned.
        replay: rows of a step that verifies drafts; None where the op plans them itself.
        records: of those drafts, for an op that has no such argument. **Mutated**.
    """

    impls: tuple[tuple[str, str], ...]
    planned: tuple[Tensor, ...] = ()
    replay: Replay | None = None
    records: Tensor | None = None

    def impl(self, op: str) -> str:
        """Return the implementation of one op."""
        return dict(self.impls)[op]

    @property
    def given(self) -> dict[str, Any]:
        """Options of the first op: what was planned, if anything."""
        return {"planned": self.planned} if self.planned else {}


def without_padding(out: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Set rows of no sequence to 0, whatever gates they have; those of a runner are finite."""
    rows = torch.arange(out.shape[0], dtype=torch.int64, device=out.device)
    return out.where((rows < cu_seqlens[-1])[:, None], 0.0)


def run_in_torch(step: Callable[[S], Tensor], x: S, *ops: str) -> Tensor:
    """Run "composed" with each op in vectorised torch."""
    forms = ((op, next(n for n in REGISTERED[op] if n.endswith("torch"))) for op in ops)
    given: dict[str, Any] = {"parts": Parts(impls=tuple(forms))}
    out = step(replace(x, **given))
    return without_padding(out, x.cu_seqlens)


def first_parts(x: Tensor, *ops: str) -> Parts:
    """Take each op's first implementation for x's device and dtype, "torch" at last."""
    return Parts(impls=tuple((op, first_impl(op, x.device, x.dtype)) for op in ops))
