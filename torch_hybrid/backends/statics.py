"""What of a plan is part of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid.pytrees import register_constant


@dataclass(frozen=True, slots=True)
class Statics:
    """The implementations of the ops that a layer calls, and the form of the step, if it has some.

    An op whose name says its execution form (``chunk_...``) is found by that name alone.
    """

    impls: tuple[tuple[str, str], ...]  # op and implementation
    form: str = ""

    def impl(self, op: str) -> str:
        """The implementation of one op."""
        return dict(self.impls)[op]


register_constant(Statics)
