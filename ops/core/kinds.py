"""Kinds of an op's arguments and results: shape, dtype, layout, and what the op mutates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")

NO_DEFAULT = "no default in the schema"  # beside an option's type
MUTATED = "mutated"  # beside the type of tensors of any number
TRACED = "for traced implementations alone"  # beside a type that no schema has


class Kind:
    """A tensor's dimensions, dtype and layout.

    Args:
        dims: sizes after the leading one, as letters, numbers and expressions; "..." where the
            op's ``check`` knows the shape.
        dtype: of the tensor, or several of them; None for that of the first field, "work" for
            float32 or for the first field's where that is wider, "any" where ``check`` knows it.
        or_float32: whether it may be float32 besides.
        counts: whether the field binds the letters of its dims that no field before it binds; or
            those that it binds, where it leaves others to a later field.
        last_dim: whether only the last dimension must be contiguous.
    """

    leading: tuple[str, ...] = ()

    def __init__(
        self,
        *dims: str,
        dtype: torch.dtype | tuple[torch.dtype, ...] | Literal["work", "any"] | None = None,
        or_float32: bool = False,
        counts: bool | str = True,
        last_dim: bool = False,
    ) -> None:
        self.dims = (*self.leading, *dims)
        self.dtype = dtype
        self.has_shape = "..." not in dims
        self.or_float32 = or_float32
        self.last_dim = last_dim
        named = counts.split() if isinstance(counts, str) else self.dims if counts else ()
        self.counted = named if self.has_shape else ()


class Rows(Kind):
    """[T, *dims]: a row for each token; rows lie any distance apart, one row is dense.

    Args:
        dims: sizes of a row.
        apart: how many dimensions lie any distance apart, from the first on.
        dtype, counts, last_dim: as in any kind.
    """

    leading = ("T",)

    def __init__(
        self,
        *dims: str,
        apart: int = 1,
        dtype: torch.dtype | Literal["work", "any"] | None = None,
        counts: bool | str = True,
        last_dim: bool = False,
    ) -> None:
        super().__init__(*dims, dtype=dtype, counts=counts, last_dim=last_dim)
        self.apart = apart


class Dense(Kind):
    """[*dims], contiguous."""


class Strided(Kind):
    """[*dims], whatever its strides; ``check`` may refuse some. ``*x.shape`` are all dims of x."""


class Pool(Kind):
    """[S, *dims], contiguous; the op mutates it. A second pool names a ``size`` of its own.

    Where the field may be None, nothing is mutated then.
    """

    def __init__(
        self,
        *dims: str,
        dtype: torch.dtype | Literal["any"] | None = None,
        size: str = "S",
        counts: bool | str = True,
    ) -> None:
        self.leading = (size,)
        super().__init__(*dims, dtype=dtype, counts=counts)


class OneOf:
    """Option of allowed values: ``Annotated[int, OneOf(16, 32)]``."""

    def __init__(self, *values: int) -> None:
        self.values = values


class Index(Kind):
    """[*dims] int32, contiguous."""

    def __init__(self, *dims: str, counts: bool = False, last_dim: bool = False) -> None:
        super().__init__(*dims, dtype=torch.int32, counts=counts, last_dim=last_dim)


@dataclass(frozen=True, slots=True)
class Returns(Generic[R]):
    """Tensors that an op returns.

    Attributes:
        like: fields whose shapes and dtypes the tensors have; empty where ``fake`` makes them.
        fake: makes empty tensors of the right shapes and dtypes from an instance of the op.
        num_tensors: how many there are; 0 is None.
    """

    like: tuple[str, ...] = ()
    fake: Callable[[Any], Tensor | tuple[Tensor, ...]] | None = None
    num_tensors: int = 1


def like(name: str) -> Returns[Tensor]:
    """Return one tensor with shape and dtype of a field."""
    return Returns(like=(name,))


def pair_like(first: str, second: str) -> Returns[tuple[Tensor, Tensor]]:
    """Return two tensors with shapes and dtypes of fields."""
    return Returns(like=(first, second), num_tensors=2)


def made(fake: Callable[[Any], Tensor]) -> Returns[Tensor]:
    """Return one tensor whose shape and dtype ``fake`` knows."""
    return Returns(fake=fake)


def pair_made(fake: Callable[[Any], tuple[Tensor, Tensor]]) -> Returns[tuple[Tensor, Tensor]]:
    """Return two tensors whose shapes and dtypes ``fake`` knows."""
    return Returns(fake=fake, num_tensors=2)


def several_made(
    count: int, fake: Callable[[Any], tuple[Tensor, ...]]
) -> Returns[tuple[Tensor, ...]]:
    """Return as many tensors, three or more, whose shapes and dtypes ``fake`` knows."""
    return Returns(fake=fake, num_tensors=count)


NOTHING: Returns[None] = Returns(num_tensors=0)
