"""The content of an unread weight: strided slices of stored tensors, joined.

The adapters of the families and ``shard`` merge, sort and cut weights with torch's own operations.
On an unread weight those operations end here, and say the same of slices. Nothing is read, or
copied, before it is known which bytes go where.

    Slice     a view of one stored tensor, by sizes and strides
    Joined    several of these side by side along one dim
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Size, Tensor

# Done to the values as they are read: a cast, a product with a factor of the shape of the slice, or
# what a function makes of them, in that shape.
Step = torch.dtype | Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file: its values lie from byte ``start``, row-major.

    ``scales`` are those of its blocks of 128 x 128, where its values are FP8 (e4m3). A ``packed``
    weight has this ``shape``; its integers lie in other tensors, in another layout. A ``refusal``
    is raised where a model takes the tensor.
    """

    name: str
    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    scales: Stored | None = None
    packed: Packed | None = None
    refusal: Exception | None = None

    @property
    def is_scaled(self) -> bool:
        """True where the stored values are quantized, and need scales to be dequantized."""
        return self.scales is not None or self.packed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The tensors that hold the integers of a weight [N, K], scales and zero points: see
    ``packed_integers.py``."""

    layout: str
    bits: int
    numbers: Stored
    scales: Stored
    zeros: Stored | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of a stored tensor.

    ``where`` is a meta tensor. Its sizes, strides and offset select the part, in elements from the
    first one of the stored tensor.
    """

    stored: Stored
    where: Tensor
    steps: tuple[Step, ...] = ()
    shape: Size = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.where.shape)

    @classmethod
    def whole(cls, stored: Stored) -> Slice:
        """Take all of a stored tensor, as it is stored."""
        where = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        return cls(stored=stored, where=where)

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Slice:
        """Take another view of the slice, and of the factors on it."""
        steps = tuple(view(step) if isinstance(step, Tensor) else step for step in self.steps)
        return replace(self, where=view(self.where), steps=steps)

    def made_of(self, values: Tensor) -> Tensor:
        """Do to values of the slice's shape what its steps say."""
        for step in self.steps:
            if isinstance(step, torch.dtype):
                values = values.to(step)
            elif isinstance(step, Tensor):
                values = values * step.to(values.device)
            else:
                values = step(values)
        return values


@dataclass(frozen=True, slots=True)
class Joined:
    """Contents side by side along ``dim``; their shapes are equal but for that dim."""

    parts: tuple[Content, ...]
    dim: int
    shape: Size = field(init=False)  # of all parts together

    def __post_init__(self) -> None:
        sizes = list(self.parts[0].shape)
        sizes[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        object.__setattr__(self, "shape", Size(sizes))


Content = Slice | Joined


def wholes(
    tensors: Mapping[str, Stored], dtype: torch.dtype
) -> dict[str, tuple[Slice, torch.dtype]]:
    """Take all of each tensor, and tell the dtype of its values: ``dtype`` where they need
    scales."""
    return {
        name: (Slice.whole(stored), dtype if stored.is_scaled else stored.dtype)
        for name, stored in tensors.items()
    }


def join(parts: Sequence[Content], dim: int) -> Content:
    """Put parts side by side along ``dim``.

    Raises:
        ValueError: their other dims differ, or there is none.
    """
    flat: list[Content] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Joined) and part.dim == dim else [part])
    others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in flat}
    if len(others) != 1:
        shapes = ", ".join(f"{name_of(part)} {[*part.shape]}" for part in flat)
        raise ValueError(f"weights to be joined along dim {dim} must agree in all others: {shapes}")
    return flat[0] if len(flat) == 1 else Joined(tuple(flat), dim)


def narrow(content: Content, dim: int, start: int, length: int) -> Content:
    """Narrow a content, like ``Tensor.narrow``."""
    if isinstance(content, Slice):
        return content.viewed(lambda tensor: tensor.narrow(dim, start, length))
    if dim != content.dim:
        return Joined(tuple(narrow(p, dim, start, length) for p in content.parts), content.dim)
    kept, first = [], 0
    for part in content.parts:
        size = part.shape[dim]
        low, high = max(start - first, 0), min(start + length - first, size)
        if low < high:
            is_whole = (low, high) == (0, size)
            kept.append(part if is_whole else narrow(part, dim, low, high - low))
        first += size
    return join(kept, dim) if kept else narrow(content.parts[0], dim, 0, 0)


def transpose(content: Content, a: int, b: int) -> Content:
    """Transpose a content, like ``Tensor.transpose``."""
    if isinstance(content, Slice):
        return content.viewed(lambda tensor: tensor.transpose(a, b))
    dim = {a: b, b: a}.get(content.dim, content.dim)
    return Joined(tuple(transpose(part, a, b) for part in content.parts), dim)


def reshape(content: Content, shape: Sequence[int]) -> Content:
    """Reshape a content, like ``Tensor.reshape``, to sizes that are all given.

    Raises:
        NotImplementedError: a seam between parts lies within the smallest rows of the new shape.
    """
    if isinstance(content, Joined):
        return _reshape_parts(content, shape)
    try:
        return content.viewed(lambda tensor: tensor.view(*shape))
    except RuntimeError:  # no strides describe it: reshape each row
        if content.shape[0] == 1:
            return reshape(content.viewed(lambda tensor: tensor.squeeze(0)), shape)
        return _reshape_parts(_rows(content), shape)


def _rows(content: Content) -> Joined:
    return Joined(tuple(narrow(content, 0, row, 1) for row in range(content.shape[0])), 0)


def _reshape_parts(joined: Joined, shape: Sequence[int]) -> Content:
    """Reshape each part on its own, where they can lie side by side along one dim again."""
    before, size = math.prod(joined.shape[: joined.dim]), joined.shape[joined.dim]
    dims = [dim for dim in range(len(shape)) if math.prod(shape[:dim]) == before]
    for dim in dims:
        inner = before * math.prod(shape[dim + 1 :])
        counts = [math.prod(part.shape) for part in joined.parts]
        if all(count % inner == 0 for count in counts):
            parts = [
                reshape(part, (*shape[:dim], count // inner, *shape[dim + 1 :]))
                for part, count in zip(joined.parts, counts, strict=True)
            ]
            return join(parts, dim)
    for dim in dims:  # a seam lies within a row of the new shape
        if shape[dim] > 1 and size % shape[dim] == 0:
            length, row = size // shape[dim], (*shape[:dim], 1, *shape[dim + 1 :])
            firsts = range(0, size, length)
            rows = [reshape(narrow(joined, joined.dim, i, length), row) for i in firsts]
            return join(rows, dim)
    if joined.dim > 0:
        return _reshape_parts(_rows(joined), shape)
    raise NotImplementedError(
        f"{name_of(joined)} and what is joined to it along dim {joined.dim} cannot be read as "
        f"{[*shape]}, got {[*joined.shape]}"
    )


def followed_by(content: Content, step: Step) -> Content:
    """Do one more step to the values; a factor has the shape of ``content``."""
    if isinstance(content, Slice):
        return replace(content, steps=(*content.steps, step))
    if not isinstance(step, Tensor):
        return Joined(tuple(followed_by(part, step) for part in content.parts), content.dim)
    factors = step.split([part.shape[content.dim] for part in content.parts], content.dim)
    pairs = zip(content.parts, factors, strict=True)
    return Joined(tuple(followed_by(part, factor) for part, factor in pairs), content.dim)


def leaves(*contents: Content) -> list[Slice]:
    """Return the slices of contents."""
    found: list[Slice] = []
    for content in contents:
        found += [content] if isinstance(content, Slice) else leaves(*content.parts)
    return found


def has_scales(content: Content) -> bool:
    """Tell whether some of a content is stored smaller, with scales."""
    return any(leaf.stored.is_scaled for leaf in leaves(content))


def slices(content: Content, where: Tensor) -> list[tuple[Slice, Tensor]]:
    """Return each slice, and the part of ``where`` that it fills, a tensor of the content's
    shape."""
    if isinstance(content, Slice):
        return [(content, where)]
    sizes = [part.shape[content.dim] for part in content.parts]
    pairs = zip(content.parts, where.split(sizes, content.dim), strict=True)
    return [found for part, place in pairs for found in slices(part, place)]


def name_of(content: Content) -> str:
    """Return the name of the first stored tensor of a content."""
    return content.stored.name if isinstance(content, Slice) else name_of(content.parts[0])
