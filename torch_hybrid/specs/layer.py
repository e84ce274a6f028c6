"""The protocol of a layer's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

from torch_hybrid.specs.pools import Pool

LayerFamily = Literal["full", "linear"]


class LayerSpec(Protocol):
    """The facts of one mixer: a frozen dataclass, which can be hashed.

    ``kind`` names all mixers that one backend plans. ``family`` is "full" where a token costs more
    the more its sequence holds, and "linear" where it always costs the same.
    """

    kind: ClassVar[str]
    family: ClassVar[LayerFamily]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def pools(self) -> Mapping[str, Pool]:
        """What the mixer keeps, by name; it is handed a tensor for each."""
        ...

    def divided(self, num_ranks: int) -> Self:
        """What each of ``num_ranks`` ranks holds.

        Raises:
            UnsupportedError: the heads cannot be spread so.
        """
        ...
