"""N-gram drafter: the tokens that followed when the last tokens of a request occurred before.

It needs no model, and finds repetitions: names, code, quotations from a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid.serving.request import Request


class Ngram:
    """Lookup of a history's last tokens in the history itself.

    The longest n-gram at the end that occurred before counts, at its latest place. If a history
    repeats itself with a period shorter than the number of drafts, the drafts repeat, too.

    Args:
        shortest, longest: lengths of the n-grams, in tokens.
    """

    def __init__(self, *, shortest: int = 2, longest: int = 4) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest must be within 1 and longest = {longest}, got {shortest}")
        self._lengths = range(longest, shortest - 1, -1)
        self._places: dict[Request, _Places] = {}

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Draft the tokens that followed the last n-gram earlier; see ``Drafter``."""
        return [self._after(x, count) for x, count in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        """Forget the n-grams of a request."""
        self._places.pop(request, None)

    def _after(self, request: Request, count: int) -> list[int]:
        places = self._places.setdefault(request, _Places(self._lengths))
        history = request.history
        begin = places.find(history)
        if begin is None:
            return []
        drafts: list[int] = []
        for place in range(begin, begin + count):
            drafts.append(history[place] if place < len(history) else drafts[place - len(history)])
        return drafts


class _Places:
    """Latest end of each n-gram in a history, the one at the history's end left out."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in lengths}
        self._num_seen = 0  # tokens whose preceding n-grams are recorded

    def find(self, history: Sequence[int]) -> int | None:
        """Find the place after an earlier occurrence of the last n-gram."""
        for length, ends in self._ends.items():
            for end in range(max(self._num_seen, length), len(history)):
                ends[tuple(history[end - length : end])] = end
        self._num_seen = len(history)
        for length, ends in self._ends.items():
            if len(history) >= length and (place := ends.get(tuple(history[-length:]))):
                return place
        return None
