"""Layers that read past tokens themselves: n-grams, or each token's last hidden state."""

from __future__ import annotations

from typing import ClassVar

import torch

from torch_hybrid.specs.layer import Divided, layer_spec
from torch_hybrid.specs.pools import RECORDS, STATE_RECORDS, Pool

KEPT_HIDDEN = 128  # last tokens whose hidden states are kept for a head that drafts


@layer_spec("ngram_embedding", "causal_conv1d")
class NgramSpec(Divided):
    """Gated embeddings of the n-grams that end at each token, and a convolution over them.

    N-grams have up to ``ngram_size`` tokens. Each residual stream has its own gates and
    convolution; ``channels`` is the width of all streams together. Of the convolution's
    ``conv_width`` taps, every ``ngram_size``-th counts, the last one first.
    """

    kind: ClassVar[str] = "ngram_embedding"

    ngram_size: int
    channels: int
    conv_width: int

    def pools(self) -> dict[str, Pool]:
        """Declare the last tokens, the convolution's last inputs, and both of drafts."""
        return {
            "tokens": Pool((self.ngram_size - 1,), per="slot", dtype=torch.int64),
            "conv": Pool((self.conv_width - 1, self.channels), per="slot"),
            RECORDS: Pool((self.channels,), per="draft"),
            STATE_RECORDS: Pool((1,), per="draft", dtype=torch.int64),
        }


@layer_spec()
class PreviousHiddenSpec(Divided):
    """Input of a head that drafts: tokens beside the model's hidden states of the tokens before.

    Hidden states are ``channels`` wide.
    """

    kind: ClassVar[str] = "previous_hidden"

    channels: int

    def pools(self) -> dict[str, Pool]:
        """Declare the last tokens and their hidden states, which the head reads to draft."""
        return {
            "hidden": Pool((KEPT_HIDDEN, self.channels), per="slot"),
            "tokens": Pool((KEPT_HIDDEN,), per="slot", dtype=torch.int64),
        }
