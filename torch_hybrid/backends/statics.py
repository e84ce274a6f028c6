"""Static part of a plan: constants of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid.pytrees import register_constant


@dataclass(frozen=True, slots=True)
class Statics:
    """Implementations of the ops that a layer calls, and the step's form if there are several."""

    impls: tuple[tuple[str, str], ...]  # op and implementation
    form: str = ""

    def impl(self, op: str) -> str:
        """Return the implementation of one op."""
        return dict(self.impls)[op]


register_constant(Statics)
