"""What comes after the last tokens where they came before."""

from __future__ import annotations

import random

import pytest

from torch_hybrid.serving.speculation import Ngram


class Held:
    """A request, as far as its history."""

    def __init__(self, history: list[int]) -> None:
        self.history = history


def drafted(history: list[int], count: int, **options: int) -> list[int]:
    [drafts] = Ngram(**options).propose([Held(history)], [count])
    return drafts


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], []),
        ([1, 2, 3], []),
        ([1, 2, 9, 8, 7, 1, 2], [9, 8, 7, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # the latest place, and its period
        ([5, 1, 2, 9, 6, 1, 2, 8, 5, 1, 2], [9, 6, 1, 2]),  # the longest run
        ([4, 4, 4], [4, 4, 4, 4]),
        ([3, 1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
    ],
)
def test_drafts(history: list[int], expected: list[int]):
    assert drafted(history, 4) == expected


def test_as_many_as_are_asked_for():
    assert drafted([1, 2, 9, 8, 1, 2], 1) == [9]
    assert drafted([1, 2, 9, 8, 1, 2], 0) == []
    assert drafted([1, 2, 1], 3) == []
    assert drafted([1, 2, 1], 3, shortest=1) == [2, 1, 2]


def test_a_history_that_grows_is_looked_up_like_a_whole_one():
    rng = random.Random(0)
    history: list[int] = []
    request, grown = Held(history), Ngram()
    for _ in range(300):
        history += [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        [drafts] = grown.propose([request], [4])
        assert drafts == drafted(list(history), 4)
    grown.forget(request)
    grown.forget(request)
