"""Inputs of a declared op: an instance of its class, with copies of what it mutates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from torch_hybrid.ops.core.declare import Declaration, Op, Pool


class DeclaredInputs(Op):
    """Mixin of an op's class whose instances are inputs of a test."""

    __slots__ = ()

    def fresh(self) -> Self:
        """Copy what the op mutates."""
        kinds = Declaration(type(self)).kinds
        pools = {name: getattr(self, name) for name in kinds if isinstance(kinds[name], Pool)}
        return replace(self, **{name: pool.clone() for name, pool in pools.items()})

    def args(self) -> tuple[Tensor, ...]:
        """Return the tensors in the op's order; what it mutates is a copy."""
        given = self.fresh()
        return tuple(getattr(given, name) for name in Declaration(type(self)).kinds)

    def exact(self) -> Self:
        """Return the same values in float64, copied."""
        floats: dict[str, Any] = {
            name: tensor.double()
            for name in Declaration(type(self)).kinds
            if (tensor := getattr(self, name)) is not None and tensor.is_floating_point()
        }
        return replace(self, **floats)
