"""The shapes of a step; each is a graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mode(Enum):
    """``DECODE``: one new token for each sequence. ``EXTEND``: any mix of lengths."""

    DECODE = "decode"
    EXTEND = "extend"


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
