"""Drafts from a request's own tokens: what came after the last tokens when they came before.

It needs no model, and finds what repeats: names, code, what is quoted from a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid.serving.request import Request


class Ngram:
    """Looks the last tokens of a history up in the history itself.

    The longest run of last tokens counts that came before, and its latest place. Where a history
    repeats itself with a period shorter than what is asked for, so do the drafts.

    Args:
        shortest, longest: of the runs that are looked up, in tokens.
    """

    def __init__(self, *, shortest: int = 2, longest: int = 4) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest must be within 1 and longest = {longest}, got {shortest}")
        self._lengths = range(longest, shortest - 1, -1)
        self._places: dict[Request, _Places] = {}

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """As ``Drafter`` says."""
        return [self._after(x, count) for x, count in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        """As ``Drafter`` says."""
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
    """Where runs of each length last ended in a history, the end of the history left out."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in lengths}
        self._num_seen = 0  # tokens that some run before them was entered for

    def find(self, history: Sequence[int]) -> int | None:
        """The place after the last run of tokens where it came before."""
        for length, ends in self._ends.items():
            for end in range(max(self._num_seen, length), len(history)):
                ends[tuple(history[end - length : end])] = end
        self._num_seen = len(history)
        for length, ends in self._ends.items():
            if len(history) >= length and (place := ends.get(tuple(history[-length:]))):
                return place
        return None
