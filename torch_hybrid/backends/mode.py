"""The shapes of a step; each is a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How many new tokens the sequences of a step have.

    ``DECODE``: one for each sequence. ``EXTEND``: any mix of lengths. A step that verifies k
    drafted tokens of each sequence is a mode of k + 1.

    Attributes:
        name: as it stands in reports.
        tokens_per_seq: of each sequence; None for any mix.
    """

    name: str
    tokens_per_seq: int | None

    DECODE: ClassVar[Mode]
    EXTEND: ClassVar[Mode]


Mode.DECODE = Mode(name="decode", tokens_per_seq=1)
Mode.EXTEND = Mode(name="extend", tokens_per_seq=None)
MODES = (Mode.DECODE, Mode.EXTEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One of the ways in which a kind of layer may run a step: ``name`` is part of the graph.

    ``num_chunks`` tables of ``num_rows`` entries each belong to it; ``num_rows`` is a size like
    those of the batch, and no part of the graph.
    """

    name: str = ""
    num_chunks: int = 0
    num_rows: int = 0


ONLY_FORM = Form()
