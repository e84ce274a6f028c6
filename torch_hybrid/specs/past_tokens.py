"""Layers that read past tokens themselves: n-grams, or each token's last hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from torch_hybrid.specs.layer import LayerFamily
from torch_hybrid.specs.pools import RECORDS, STATE_RECORDS, Pool

KEPT_HIDDEN = 128  # last tokens whose hidden states are kept for a head that drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpec:
    """Embeddings of the n-grams up to ``ngram_size`` that end at each token, let in by gates, and a
    convolution over them, all of it for each of the residual streams.

    ``channels`` is the width of all streams together; of the convolution's ``conv_width`` taps,
    every ``ngram_size``-th counts, the last one first.
    """

    kind: ClassVar[str] = "ngram_embedding"
    family: ClassVar[LayerFamily] = "linear"

    ngram_size: int
    channels: int
    conv_width: int

    def pools(self) -> dict[str, Pool]:
        """The last tokens, the convolution's last inputs, and both of drafts."""
        return {
            "tokens": Pool((self.ngram_size - 1,), per="slot", dtype=torch.int64),
            "conv": Pool((self.conv_width - 1, self.channels), per="slot"),
            RECORDS: Pool((self.channels,), per="draft"),
            STATE_RECORDS: Pool((1,), per="draft", dtype=torch.int64),
        }

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: all of it on every rank."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousHiddenSpec:
    """What a head that predicts further tokens reads: each token beside the model's hidden state of
    the token before it, ``channels`` wide."""

    kind: ClassVar[str] = "previous_hidden"
    family: ClassVar[LayerFamily] = "linear"

    channels: int

    def pools(self) -> dict[str, Pool]:
        """The last tokens and their hidden states: the head reads them when it is to draft."""
        return {
            "hidden": Pool((KEPT_HIDDEN, self.channels), per="slot"),
            "tokens": Pool((KEPT_HIDDEN,), per="slot", dtype=torch.int64),
        }

    def divided(self, num_ranks: int) -> Self:
        """As ``LayerSpec`` says: all of it on every rank."""
        return self
