"""Matcher: how far the output of one request has come in its grammar.

It follows the request's history and nothing else. So preemption, prefix caches and interrupted
steps leave it right, and drafts never advance it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.sampling.grammar.worker import Worker

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens as llguidance reads them, shared by all matchers of an engine."""

    tokenizer: LLTokenizer
    worker: Worker  # makes the masks of a step
    complete: int  # no token of the model: its bit is set where a grammar is complete

    @property
    def num_words(self) -> int:
        """Number of int32 words of a mask."""
        return -(-self.tokenizer.vocab_size // 32)


@dataclass(eq=False)
class Matcher:
    """State of one request in its grammar."""

    state: LLMatcher  # at the grammar's beginning; only this matcher uses it
    vocabulary: Vocabulary  # tokens of the engine
    num_prompt: int  # tokens of the prompt, which the grammar does not cover
    end_token_ids: frozenset[int]  # tokens that end the request where the grammar is complete
    after: tuple[int, ...]  # tokens that the grammar begins after; none: it begins with the output

    def __post_init__(self) -> None:
        self._num_seen = self.num_prompt
        self._recent: tuple[int, ...] = ()  # tokens, as many as may be the border
        self._has_begun = not self.after
        self._failed: str | None = None
        self._ends = _bits(self.end_token_ids, self.vocabulary.num_words)
        self._not_complete = ~_bits([self.vocabulary.complete], self.vocabulary.num_words)

    def advance(self, history: Sequence[int]) -> None:
        """Follow the tokens of a history that are new since the last call; none ends the
        request."""
        for token in history[self._num_seen :]:
            if self._has_begun:
                self.state.consume_token(token)
            else:
                self._recent = (*self._recent, token)[-len(self.after) :]
                self._has_begun = self._recent == self.after
        self._num_seen = len(history)

    @property
    def error(self) -> str | None:
        """Reason why the matcher cannot go on, such as a step that takes too long."""
        if self._failed is None and self.state.is_error():
            self._failed = self.state.get_error()
        return self._failed

    def fail(self, why: str) -> None:
        """End the matcher: another thread may still use its state."""
        self._failed = why

    @property
    def is_finished(self) -> bool:
        """True if the grammar is complete and nothing can follow."""
        return self._has_begun and self.state.is_stopped()

    def num_free(self, drafts: Sequence[int]) -> int:
        """Count the next tokens that come before the grammar; more than the drafts if all do."""
        if self._has_begun:
            return 0
        recent = self._recent
        for n, draft in enumerate(drafts, 1):
            recent = (*recent, draft)[-len(self.after) :]
            if recent == self.after:
                return n
        return len(drafts) + 1

    def finish_rows(self, rows: Tensor, num_free: int) -> None:
        """Let the request end where its grammar is complete, and only there.

        Args:
            rows: masks [R, W] int32, one after another, as llguidance fills them; written.
            num_free: rows before the grammar begins.
        """
        rows[:num_free] = ~self._ends
        word, bit = divmod(self.vocabulary.complete, 32)
        for row in rows[num_free:]:
            if int(row[word]) >> bit & 1:
                row &= self._not_complete
                row |= self._ends


def _bits(tokens: Sequence[int] | frozenset[int], num_words: int) -> Tensor:
    """Pack a set of tokens into words [W] int32."""
    is_in = torch.zeros(num_words, 32, dtype=torch.int64, device="cpu")
    for token in tokens:
        is_in[token // 32, token % 32] = 1
    return (is_in << torch.arange(32, dtype=torch.int64, device="cpu")).sum(-1).to(torch.int32)
