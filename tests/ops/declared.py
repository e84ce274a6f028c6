"""Inputs of a declared op: an instance of its class, with copies of what it mutates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module
from itertools import pairwise
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from tests.ops.pages import offsets
from torch_hybrid.ops.core.declaration import Declaration
from torch_hybrid.ops.core.declare import Op, Pool

Out = TypeVar("Out")
_OF_IMPL = {"impl", "chunk_size", "planned"}


class DeclaredInputs(Op):
    """Mixin of an op's class whose instances are inputs of a test."""

    __slots__ = ()

    def fresh(self) -> Self:
        """Copy what the op mutates."""
        kinds = Declaration(type(self)).kinds
        pools = ((name, getattr(self, name)) for name in kinds if isinstance(kinds[name], Pool))
        return replace(self, **{name: pool.clone() for name, pool in pools if pool is not None})

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

    def rows_at(self, index: Any) -> dict[str, Tensor]:
        """Return what is given for each token, of some of them."""
        return {
            name: tensor[index]
            for name, kind in Declaration(type(self)).kinds.items()
            if kind.dims[0] == "T" and (tensor := getattr(self, name)) is not None
        }


class RecurrentInputs(DeclaredInputs):
    """Mixin of a recurrence's class, whose contract reads the state that a call has left."""

    __slots__ = ()
    tokens = DeclaredInputs.rows_at

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


class PagedInputs(DeclaredInputs):
    """Mixin of a class whose op keeps rows of tokens in pages, as they are or in 8 bits."""

    __slots__ = ()

    def args(self) -> tuple[Tensor, ...]:
        """Return what is given by position; the pool is a copy."""
        given = self.fresh()
        return tuple(getattr(given, each.name) for each in fields(self) if not each.kw_only)

    @property
    def kept(self) -> Tensor:
        """Return the pool."""
        return getattr(self, self._pool()[0])

    @property
    def page_dim(self) -> int:
        """Find the dimension of pages in the pool; that of their rows is the next."""
        return self._pool()[1].dims.index("P")

    @property
    def page_size(self) -> int:
        """Count the rows of a page."""
        return self.kept.shape[self.page_dim + 1]

    def _pool(self) -> tuple[str, Pool]:
        kinds = Declaration(type(self)).kinds.items()
        return next((name, kind) for name, kind in kinds if isinstance(kind, Pool))

    def with_pool(self, pool: Tensor) -> Self:
        """Put another pool in the place of this one."""
        return replace(self, **{self._pool()[0]: pool})

    def in_pieces(
        self, size: int, run: Callable[[Self], tuple[Out, Tensor]]
    ) -> tuple[list[Out], Tensor]:
        """Run a sequence that is new by so many tokens at once.

        Args:
            size: tokens of each piece; the last may have fewer.
            run: takes a piece, and returns results and the pool, over which the next one runs.

        Returns:
            The results of each piece, and the pool.
        """
        outs, pool, total = [], self.kept, int(self.cu_seqlens[-1])
        for begin in range(0, total, size):
            end = min(begin + size, total)
            piece = replace(
                self.with_pool(pool),
                **self.rows_at(slice(begin, end)),
                cu_seqlens=offsets([end - begin]),
                seq_lens=offsets([end])[1:],
            )
            out, pool = run(piece)
            outs.append(out)
        return outs, pool

    def of(self, seqs: Sequence[int]) -> tuple[Tensor, Self]:
        """Take some sequences, in this order and without padding; and find their rows."""
        spans = [*pairwise(self.cu_seqlens.tolist())]
        rows = torch.cat([torch.arange(*spans[n]) for n in seqs])
        part = replace(
            self,
            **self.rows_at(rows),
            cu_seqlens=offsets([spans[n][1] - spans[n][0] for n in seqs]),
            seq_lens=self.seq_lens[seqs],
            page_table=self.page_table[seqs],
        )
        return rows, part


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
