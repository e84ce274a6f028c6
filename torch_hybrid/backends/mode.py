"""The shapes of a step; each is a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How many new tokens the sequences of a step have.

    ``DECODE``: one for each sequence. ``EXTEND``: any mix of lengths. ``verify(k)``: one for each
    sequence, and up to k drafts after it, which are not certain. ``mixed(k)``: any mix of lengths,
    up to k tokens at the end of each sequence not certain. ``draft(k)``: k steps of the model's
    head, one after the other, each of one token for each sequence, the first one also of tokens
    before it.

    Attributes:
        name: as it stands in reports.
        tokens_per_seq: of each sequence; None for any mix.
        num_drafts: how many of those are not certain, at most: sequences may have fewer.
        num_chained: steps of the model's head; 0 where the model itself runs.
    """

    name: str
    tokens_per_seq: int | None
    num_drafts: int = 0
    num_chained: int = 0

    DECODE: ClassVar[Mode]
    EXTEND: ClassVar[Mode]

    @classmethod
    def verify(cls, num_drafts: int) -> Mode:
        """The mode of steps that verify up to so many drafts of each sequence."""
        return cls(name="verify", tokens_per_seq=1 + num_drafts, num_drafts=num_drafts)

    @classmethod
    def mixed(cls, num_drafts: int) -> Mode:
        """The mode of all steps, where there is to be one, those of ``verify`` too."""
        return cls(name="extend", tokens_per_seq=None, num_drafts=num_drafts)

    @classmethod
    def draft(cls, num_chained: int) -> Mode:
        """The mode of so many steps of the model's head, each after the one before it."""
        return cls(name=f"draft of {num_chained}", tokens_per_seq=1, num_chained=num_chained)


Mode.DECODE = Mode(name="decode", tokens_per_seq=1)
Mode.EXTEND = Mode(name="extend", tokens_per_seq=None)
MODES = (Mode.DECODE, Mode.EXTEND)


def modes_of(num_drafts: int, *, prefill: bool, is_one_mode: bool) -> tuple[Mode, ...]:
    """The modes of a model's steps; where there are drafts, the last one verifies them.

    ``is_one_mode``: all are to be of one, where there are drafts.
    """
    if is_one_mode and num_drafts:
        return (Mode.mixed(num_drafts),)
    modes = MODES if prefill else (Mode.DECODE,)
    return (*modes, Mode.verify(num_drafts)) if num_drafts else modes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """One of the ways in which a kind of layer may run a step: ``name`` is part of the graph.

    ``num_chunks`` tables of ``num_rows`` entries each belong to it; ``num_rows`` is a size like
    those of the batch, and no part of the graph.
    """

    name: str = ""
    num_chunks: int = 0
    num_rows: int = 0


ONLY_FORM = LayerForm()
