"""Text as tokens come in: whole characters only, and an end at the first stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"  # what decoders write for bytes that are not a whole character (yet)
MOST_UNFINISHED = 8  # tokens; a character has at most 4 bytes, and a token of it one at least


class Tokenizer(Protocol):
    """What the engine uses of a tokenizer; those of transformers have it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """The growing text of one request.

    A token's text depends on its neighbours, so the last few tokens are decoded with and without
    the new one, and what is longer by is new; the cost of a token does not grow with the text.

    Args:
        tokenizer: decodes.
        stop: texts that end the request; ``text`` then ends before the first of them. Special
            tokens have no place in ``text``, and still end it where one is a stop text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []  # the last few: those of the piece before, and new ones
        self._num_context = 0  # how many of them are in the text already
        self._num_given = 0  # characters that were returned

    def add(self, token: int) -> str:
        """Take a token; return the text that is certain now and was not before."""
        self._tokens.append(token)
        decoded, known = self._decode(self._tokens), self._known()
        if len(decoded) > len(known) and not decoded.endswith(UNFINISHED):
            self._append(decoded[len(known) :])
            self._settle(len(self._tokens))
        elif special := self._special_text(token):
            self._tokens.pop()  # it has no part in any text
            if special in self._stop:
                self._take_rest()
                self.is_stopped = True
        elif len(self._tokens) - self._num_context > MOST_UNFINISHED:
            self._settle_broken()
        return self._give(len(self.text) - self._num_withheld())

    def finish(self) -> str:
        """Return the rest: no further token comes. It may turn out to hold a stop text."""
        if not self.is_stopped:
            self._take_rest()
        return self.flush()

    def flush(self) -> str:
        """Return what was held back of the text so far, without decoding anything further."""
        return self._give(len(self.text))

    def _known(self) -> str:
        return self._decode(self._tokens[: self._num_context])

    def _take_rest(self) -> None:
        """Take the text of all tokens, that of an unfinished character too."""
        self._append(self._decode(self._tokens)[len(self._known()) :])

    def _settle(self, count: int) -> None:
        """The first ``count`` tokens are in the text: what was new of them is context now."""
        del self._tokens[: self._num_context]
        self._num_context = count - self._num_context

    def _settle_broken(self) -> None:
        """Take bytes that make no character, up to those that may begin one."""
        whole = self._decode(self._tokens)
        for count in range(len(self._tokens) - 1, self._num_context, -1):
            broken = self._decode(self._tokens[:count])
            if broken + self._decode(self._tokens[count:]) == whole:
                self._append(broken[len(self._known()) :])
                self._settle(count)
                return

    def _special_text(self, token: int) -> str:
        """What a special token is written as; "" for every other token."""
        if self._decode([token]):
            return ""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _append(self, piece: str) -> None:
        """Add to the text, and cut it before the first stop text."""
        longest = max(map(len, self._stop), default=1)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [at for at in (self.text.find(stop, start) for stop in self._stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True

    def _num_withheld(self) -> int:
        """Characters at the end that may turn out to begin a stop text."""
        if self.is_stopped:
            return 0
        lengths = [
            length
            for stop in self._stop
            for length in range(1, len(stop))
            if self.text.endswith(stop[:length])
        ]
        return max(lengths, default=0)

    def _give(self, end: int) -> str:
        piece = self.text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
