"""The two shapes of a step; each is one graph."""

from __future__ import annotations

from enum import Enum


class Mode(Enum):
    """``DECODE``: one new token for each sequence. ``EXTEND``: any mix of lengths."""

    DECODE = "decode"
    EXTEND = "extend"
