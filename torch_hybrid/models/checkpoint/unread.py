"""Weights of a checkpoint, as tensors that are handed on, cut and joined before they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_hybrid.models.checkpoint import content as contents
from torch_hybrid.models.checkpoint.content import Content, Stored
from torch_hybrid.models.checkpoint.pieces import read_content, reader_of

aten = torch.ops.aten

_COMPARED = 512 << 10  # bytes of each weight that are compared at once


class Unread(Tensor):
    """A weight that is described by its content; it has no values yet.

    Views, joins, casts and products with factors give another unread weight, which looks
    contiguous. An operation that needs values gives a tensor on the meta device: transformers
    initialises weights that it then throws away.

    Args:
        content: slices of stored tensors.
        dtype: of its values once they are read.
        device: where they will be.
        shape: of the weight, where ``content`` says the same bytes in another one.
        unit: dtype of the content's own values, where it is another than ``dtype``.
    """

    content: Content
    unit: torch.dtype

    @staticmethod
    def __new__(
        cls: type[Unread],
        content: Content,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shape: Sequence[int] | None = None,
        unit: torch.dtype | None = None,
    ) -> Unread:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, shape or content.shape, dtype=dtype, device=device
        )

    def __init__(
        self,
        content: Content,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shape: Sequence[int] | None = None,
        unit: torch.dtype | None = None,
    ) -> None:
        self.content = content
        self.unit = unit or dtype

    def place_in(self, memory: Tensor) -> Tensor:
        """View memory of this weight's shape and dtype as its content has it."""
        return memory.view(self.unit).view(self.content.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unread({contents.name_of(self.content)}, {[*self.shape]}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OPS:
            return _OPS[func](*args, **(kwargs or {}))
        if func._can_decompose():  # in the body of a custom op nothing has done so before
            return func.decompose(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} of a weight that has not been read")
        args, kwargs = tree_map_only(Tensor, _without_values, (args, kwargs or {}))
        return func(*args, **kwargs)


def unread_tensors(
    tensors: Mapping[str, Stored], dtype: torch.dtype, device: torch.device
) -> dict[str, Unread]:
    """Make weights of all stored tensors, to be read to ``device``; those that have scales are of
    ``dtype``."""
    found = contents.wholes(tensors, dtype).items()
    return {name: Unread(content, own, device) for name, (content, own) in found}


def _without_values(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _like(x: Tensor, content: Content, dtype: torch.dtype | None = None) -> Unread:
    return Unread(content, dtype or x.dtype, x.device)


def _same(x: Unread, **_options: Any) -> Unread:
    return Unread(x.content, x.dtype, x.device, shape=x.shape, unit=x.unit)


def _reshape(x: Unread, shape: Sequence[int]) -> Unread:
    known = math.prod(size for size in shape if size != -1)
    sizes = [x.numel() // known if size == -1 else size for size in shape]
    return _like(x, contents.reshape(x.content, sizes))


def _squeeze(x: Unread, dim: int) -> Unread:
    dim %= x.ndim
    return _same(x) if x.shape[dim] != 1 else _reshape(x, [*x.shape[:dim], *x.shape[dim + 1 :]])


def _unsqueeze(x: Unread, dim: int) -> Unread:
    dim %= x.ndim + 1
    return _reshape(x, [*x.shape[:dim], 1, *x.shape[dim:]])


def _slice(
    x: Unread, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Unread:
    if step != 1:
        raise NotImplementedError(f"every {step}th row of a weight that has not been read")
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return _like(x, contents.narrow(x.content, dim % x.ndim, first, max(last - first, 0)))


def _split_with_sizes(x: Unread, sizes: Sequence[int], dim: int = 0) -> list[Unread]:
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(x, dim, first, first + s) for first, s in zip(firsts, sizes, strict=True)]


def _split(x: Unread, size: int, dim: int = 0) -> list[Unread]:
    return [_slice(x, dim, first, first + size) for first in range(0, x.shape[dim], size)]


def _transpose(x: Unread, a: int, b: int) -> Unread:
    return _like(x, contents.transpose(x.content, a % x.ndim, b % x.ndim))


def _cat(tensors: Sequence[Unread], dim: int = 0) -> Unread:
    first, dtype = tensors[0], reduce(torch.promote_types, (x.dtype for x in tensors))
    parts = [_to_copy(x, dtype=dtype).content for x in tensors]
    return _like(first, contents.join(parts, dim % first.ndim), dtype)


def _stack(tensors: Sequence[Unread], dim: int = 0) -> Unread:
    return _cat([_unsqueeze(x, dim) for x in tensors], dim)


def _to_copy(x: Unread, *, dtype: torch.dtype | None = None, **_options: Any) -> Unread:
    if dtype in (None, x.dtype):
        return _same(x)
    return _like(x, contents.followed_by(x.content, dtype), dtype)


def _mul(x: Unread, factor: Tensor | float) -> Unread:
    dtype = torch.result_type(_without_values(x), factor)
    factors = torch.as_tensor(factor, dtype=dtype, device="cpu").expand(x.shape)
    return _like(x, contents.followed_by(_to_copy(x, dtype=dtype).content, factors), dtype)


def _zeros_like(x: Unread, *, dtype: torch.dtype | None = None, **_options: Any) -> Tensor:
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=x.device)


def _ones_like(x: Unread, **_options: Any) -> Unread:
    return _like(x, contents.followed_by(x.content, torch.ones_like))


def _equal(x: Unread, y: Unread) -> bool:
    """Read two weights that may be tied, and tell whether they have the same bits: no other
    question is answered by reading."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.numel():
        return True
    row_bytes = x.nbytes // len(x)
    num_rows = max(1, _COMPARED // row_bytes)  # few rows stay in the cache
    # Python compares these bytes: torch would wake its threads each time.
    memory = [bytearray(num_rows * row_bytes) for _ in range(2)]
    values = [torch.frombuffer(own, dtype=x.dtype).view(num_rows, *x.shape[1:]) for own in memory]
    with reader_of(x.content, y.content) as reader:
        for first in range(0, len(x), num_rows):
            count = min(num_rows, len(x) - first)
            for z, place in zip((x, y), values, strict=True):
                read_content(reader, contents.narrow(z.content, 0, first, count), place[:count])
            if memory[0] != memory[1]:
                return False
    return True


_OPS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.cat.default: _cat,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.equal.default: _equal,
    aten.mul.Tensor: _mul,
    aten.ones_like.default: _ones_like,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.dim: _squeeze,
    aten.stack.default: _stack,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _reshape,
    aten._to_copy.default: _to_copy,
    aten.zeros_like.default: _zeros_like,
}
