"""Protocol of layer specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

from torch_hybrid.pytrees import register_part
from torch_hybrid.specs.pools import Pool

LayerFamily = Literal["full", "linear"]


class LayerSpec(Protocol):
    """The facts of one mixer: a frozen dataclass, which can be hashed.

    ``kind`` names all mixers that one backend plans. ``family`` is "full" if the cost of a token
    grows with the length of its sequence, and "linear" if it is constant.
    """

    kind: ClassVar[str]
    family: ClassVar[LayerFamily]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def pools(self) -> Mapping[str, Pool]:
        """Declare the tensors that the mixer keeps between steps, by name."""
        ...

    def divided(self, num_ranks: int) -> Self:
        """Divide the layer among ``num_ranks`` ranks; return the spec of each rank's part.

        Raises:
            UnsupportedError: the heads cannot be divided so.
        """
        ...


class Divided:
    """Base of specs, "linear" ones by default, whose fields say how ranks share them.

    ``Annotated[int, divide]`` is such a field. Those without ``divide`` or ``divide_or_repeat`` are
    the same on every rank.
    """

    __slots__ = ()
    family: ClassVar[LayerFamily] = "linear"
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def divided(self, num_ranks: int) -> Self:
        """Divide the layer among ranks; see ``LayerSpec``."""
        parts = {
            name: rule(name, getattr(self, name), num_ranks)
            for name, hint in get_type_hints(type(self), include_extras=True).items()
            for rule in getattr(hint, "__metadata__", ())
        }
        return replace(self, **parts)


SpecT = TypeVar("SpecT", bound=LayerSpec)
SPECS: dict[str, type[LayerSpec]] = {}  # by kind
# Ops of layers that call no others, the recurrence first, by kind. Each takes any number of tokens.
OPS: dict[str, tuple[str, ...]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def layer_spec(*ops: str) -> Callable[[type[SpecT]], type[SpecT]]:
    """Make a class the spec of its kind: a frozen dataclass, which is part of traced graphs.

    ``ops`` are those that its layers call. Without them, the kind has a backend of its own.
    """

    def make(cls: type[SpecT]) -> type[SpecT]:
        spec = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        register_part(spec)
        SPECS[spec.kind] = spec
        if ops:
            OPS[spec.kind] = ops
        return spec

    return make
