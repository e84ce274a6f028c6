"""Incremental detokenizer: emits text that later tokens cannot change, and finds stop texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

UNFINISHED = "\ufffd"  # what decoders write for bytes of an unfinished or invalid character
_MOST_BYTES = 3  # of an unfinished character
_FEWEST_KEPT = 4  # tokens of context for decoding the next ones; at most twice as many are kept
# Sample of the byte tokens of a vocabulary with byte fallback, which has all 256.
_NAMES_OF_BYTES = ["<0xFF>", "<0xF0>", "<0xE2>", "<0xC3>", "<0x80>"]
# A private-use character: vocabularies have it as bytes or not at all.
_RARE = "\U00100000"
# Where transformers' clean-up may take spaces or give them back, by what follows: "do n ' t" is
# "don't", and "a ' " is "a'" before a letter and "a '." before a full stop.
_OPEN_SPACES = re.compile(r"(?: {1,2}| {0,2}'| n ?'?| '[vr])\Z")


class Tokenizer(Protocol):
    """Interface of a tokenizer, as the engine uses it; those of transformers have it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@runtime_checkable
class _NamesTokens(Protocol):
    """A tokenizer that knows tokens by their names; those of transformers do."""

    def convert_tokens_to_ids(self, tokens: list[str]) -> Any: ...


@dataclass(eq=False)
class Detokenizer:
    """The growing text of one request: the pieces add up to what decoding all tokens gives.

    A token's text depends on its neighbours, so each token is decoded with the last few tokens.
    Only text that is final is emitted: a later token may change the bytes of an unfinished run, and
    spaces that a clean-up takes. The cost of a token does not grow with the text.
    """

    tokenizer: Tokenizer  # decodes
    # texts that end the request; ``text`` then ends before the first of them. A special token that
    # is a stop text ends the request too
    stop: Sequence[str] = ()
    hides_special: bool = True  # special tokens do not appear in ``text``

    def __post_init__(self) -> None:
        self.text = ""
        self.is_stopped = False
        self._run_breaker = _run_breaker(self.tokenizer)
        self._tokens: list[int] = []  # the last few
        self._decoded = ""  # text of those tokens
        self._num_taken = 0  # characters of ``_decoded`` that are in ``text``
        self._num_given = 0  # characters that were returned

    def add(self, token: int) -> str:
        """Take a token; return the text that has become final."""
        decoded = self._decode([*self._tokens, token])
        if decoded == self._decoded and (special := self._special_text(token)):
            if special in self.stop:  # other special tokens are not in any text
                self._take(len(decoded))
                self.is_stopped = True
        else:
            self._tokens.append(token)
            self._decoded = decoded
            self._take(self._num_certain())
            self._forget()
        return self._give(len(self.text) - self._num_withheld())

    def finish(self) -> str:
        """Return the rest of the text after the last token. It may turn out to hold a stop text."""
        if not self.is_stopped:
            self._take(len(self._decoded))
        return self.flush()

    def flush(self) -> str:
        """Return the text held back so far, without decoding anything further."""
        return self._give(len(self.text))

    def _num_certain(self) -> int:
        """Count the characters of the last few tokens that no later token changes."""
        decoded = self._decoded
        whole = decoded.rstrip(UNFINISHED)
        if self._run_breaker is None:
            certain = max(len(whole), len(decoded) - _MOST_BYTES)
        else:  # one byte may invalidate all bytes of its run, or complete invalid ones
            broken = self._decode([*self._tokens, self._run_breaker])
            certain = min(len(whole), num_alike(decoded, broken))
        changing = _OPEN_SPACES.search(decoded[:certain])
        return certain if changing is None else changing.start()

    def _take(self, certain: int) -> None:
        """Add final characters to the text, and cut it before the first stop text.

        A stop text in the rest counts too: the request ends there, so nothing that follows can
        change it. An unfinished character does not count.
        """
        longest = max(map(len, self.stop), default=1)
        start = max(0, len(self.text) - longest + 1)
        end = max(certain, len(self._decoded.rstrip(UNFINISHED)))
        seen = self.text + self._decoded[self._num_taken : end]
        found = [at for at in (seen.find(stop, start) for stop in self.stop) if at >= 0]
        if found:
            self.text = seen[: min(found)]
            self.is_stopped = True
        else:
            self.text += self._decoded[self._num_taken : certain]
            self._num_taken = max(self._num_taken, certain)

    def _forget(self) -> None:
        """Drop the oldest tokens if the others decode to the same text without them.

        The first token left may lose a leading space, so the text after it is compared. Characters
        that are not in the text yet must follow it as well.
        """
        if len(self._tokens) < 2 * _FEWEST_KEPT:
            return
        num_open = len(self._decoded) - self._num_taken
        for kept in range(_FEWEST_KEPT, len(self._tokens)):
            tokens = self._tokens[-kept:]
            first, decoded = self._decode(tokens[:1]), self._decode(tokens)
            num_following = len(decoded) - len(first)
            is_alike = self._decoded.endswith(decoded[len(first) :])
            if first and is_alike and num_open <= num_following:
                self._tokens, self._decoded = tokens, decoded
                self._num_taken = len(decoded) - num_open
                return

    def _special_text(self, token: int) -> str:
        """Return the text of a special token; "" for every other token."""
        if self._decode([token]):
            return ""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _num_withheld(self) -> int:
        """Count the characters at the end that may begin a stop text."""
        if self.is_stopped:
            return 0
        lengths = [
            length
            for stop in self.stop
            for length in range(1, len(stop))
            if self.text.endswith(stop[:length])
        ]
        return max(lengths, default=0)

    def _give(self, end: int) -> str:
        piece = self.text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=self.hides_special)


def num_alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Count the characters, or tokens, of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(one), len(other)))


def _run_breaker(tokenizer: Tokenizer) -> int | None:
    """Find a token of one byte that makes whole characters before it unreadable.

    Byte fallback has such tokens: a run of bytes is text only if all of it is valid UTF-8. None for
    tokenizers that decode each character by itself, or have no byte tokens.
    """

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    try:
        if isinstance(tokenizer, _NamesTokens):  # decoders find byte tokens by name, too
            found = tokenizer.convert_tokens_to_ids(_NAMES_OF_BYTES)
            named = {token for token in found if token is not None}
            return min((token for token in named if text([token]) == UNFINISHED), default=None)
        run = tokenizer.encode(_RARE)
        parts = [token for token in run if text([token]) == UNFINISHED]
        breaks = parts and not text([*run, parts[0]]).startswith(text(run))
    except Exception:  # a caller's tokenizer without byte tokens cannot write the character
        return None
    return parts[0] if breaks else None
