"""Inputs of a declared op: an instance of its class, with copies of what it mutates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, Self

from torch import Tensor

from torch_hybrid.ops.core.declare import Declaration, Op, Pool

_OF_IMPL = {"impl", "chunk_size", "planned"}


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


class RecurrentInputs(DeclaredInputs):
    """Mixin of a recurrence's class, whose contract reads the state that a call has left."""

    __slots__ = ()

    def copy(self) -> Self:
        """Copy what the op mutates."""
        return self.fresh()

    def args(self) -> tuple[Tensor, ...]:
        """Return what is given by position in the op's order, none of it a copy."""
        return tuple(getattr(self, each.name) for each in fields(self) if not each.kw_only)

    def options(self) -> dict[str, Any]:
        """Return what is given by name, tensors too, but what is an implementation's matter."""
        named = (each.name for each in fields(self) if each.kw_only and each.name not in _OF_IMPL)
        return {name: value for name in named if (value := getattr(self, name)) is not None}

    def tokens(self, index: Any) -> dict[str, Tensor]:
        """Return what is given for each token, of some of them."""
        return {
            name: tensor[index]
            for name, kind in Declaration(type(self)).kinds.items()
            if kind.dims[0] == "T" and (tensor := getattr(self, name)) is not None
        }


def oracle_of(declaration: Declaration) -> Callable[[Op], Any]:
    """Find the function that takes the op's class, in reference.py beside op.py."""
    package, _, name = declaration.cls.__module__.rpartition(".")
    module = import_module(f"{package}.reference{name.removeprefix('op')}")
    names = {cls.__name__ for cls in declaration.cls.__mro__}
    (found,) = (
        each
        for each in vars(module).values()
        if inspect.isfunction(each)
        and each.__module__ == module.__name__
        and set(each.__annotations__) == {*inspect.signature(each).parameters, "return"}
        and len(each.__annotations__) == 2
        and next(iter(each.__annotations__.values())) in names
    )
    return found
