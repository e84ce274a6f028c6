"""Modes and forms of a step; each pair is a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch_hybrid.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Mode of a step: the number of new tokens that each sequence has.

    ``DECODE``: one per sequence. ``EXTEND``: any mix of lengths. ``verify(k)``: one per sequence,
    and up to k drafts after it. ``mixed(k)``: any mix of lengths, each sequence's last tokens, up
    to k, being drafts. ``draft(k)``: k chained steps of the model's head, of one token per
    sequence. The first of these steps also runs the tokens that the head has not read.

    Attributes:
        name: name in reports.
        tokens_per_seq: new tokens of each sequence, drafts included; None for any mix.
        num_drafts: the most drafts among those; a sequence may have fewer.
        num_chained: number of steps of the model's head; 0 for a step of the model itself.
    """

    name: str
    tokens_per_seq: int | None
    num_drafts: int = 0
    num_chained: int = 0

    DECODE: ClassVar[Mode]
    EXTEND: ClassVar[Mode]

    @classmethod
    def verify(cls, num_drafts: int) -> Mode:
        """Make the mode of steps that verify up to ``num_drafts`` drafts per sequence."""
        return cls(name="verify", tokens_per_seq=1 + num_drafts, num_drafts=num_drafts)

    @classmethod
    def mixed(cls, num_drafts: int) -> Mode:
        """Make the mode of steps of any lengths that verify drafts too: it serves all steps."""
        return cls(name="extend", tokens_per_seq=None, num_drafts=num_drafts)

    @classmethod
    def draft(cls, num_chained: int) -> Mode:
        """Make the mode of ``num_chained`` steps of the model's head, one after the other."""
        return cls(name=f"draft of {num_chained}", tokens_per_seq=1, num_chained=num_chained)


Mode.DECODE = Mode(name="decode", tokens_per_seq=1)
Mode.EXTEND = Mode(name="extend", tokens_per_seq=None)
MODES = (Mode.DECODE, Mode.EXTEND)


def modes_of(num_drafts: int, *, prefill: bool, is_one_mode: bool) -> tuple[Mode, ...]:
    """List the modes of a model's steps; with drafts, the last one verifies them.

    With ``is_one_mode`` and drafts, ``mixed`` is the only mode.
    """
    if is_one_mode and num_drafts:
        return (Mode.mixed(num_drafts),)
    modes = MODES if prefill else (Mode.DECODE,)
    return (*modes, Mode.verify(num_drafts)) if num_drafts else modes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """Form in which a kind of layer runs a step: ``name`` and ``num_chunks`` are part of the graph.

    The form's plan has ``num_chunks`` tables of ``num_rows`` entries. ``num_rows`` is a symbolic
    size, like those of the batch. Steps with adapters have forms that take them alone.
    """

    name: str = ""
    num_chunks: int = 0
    num_rows: int = 0
    takes_adapters: bool = field(default=True, compare=False)


ONLY_FORM = LayerForm()


class OneForm:
    """Base of backends whose steps of a mode have one form."""

    def forms(self, mode: Mode) -> tuple[LayerForm, ...]:
        """List the forms of a mode's steps: the only one."""
        return (ONLY_FORM,)

    def form_of(self, batches: Sequence[Batch], mode: Mode) -> LayerForm:
        """Return the only form."""
        return ONLY_FORM
