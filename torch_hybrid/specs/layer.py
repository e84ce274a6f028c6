"""Protocol of layer specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

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
