"""How long drafts are, by what was accepted and by what steps took."""

from __future__ import annotations

import random

import pytest

from torch_hybrid.speculation.pace import Course, Pace, expected


def trained(cost: float, *, num_seqs: int = 1) -> Pace:
    """A pace for which a draft adds ``cost`` to the time of a step."""
    pace = Pace(4)
    for _ in range(4):
        for length in range(5):
            pace.note_step(num_seqs, length, 1.0 + cost * length)
    return pace


def served(pace: Pace, share: float, cost: float, num_tokens: int = 400) -> float:
    """The time of a request of which a share of drafts is right, over that without."""
    rng, course, size, seconds = random.Random(0), Course(), 0, 0.0
    while size < num_tokens:
        [length] = [0] if pace.rests else pace.lengths([course], [4])
        count = 0
        while count < length and rng.random() < share:
            count += 1
        if length:
            pace.note_drafts(course, length, count)
        took = 1.0 + cost * length
        pace.note_step(1, length, took)
        seconds += took
        size += 1 + count
    return seconds / size


@pytest.mark.parametrize("cost", [0.05, 0.15, 0.5, 1.5])
def test_drafts_that_are_never_right_cost_little(cost: float):
    pace = trained(cost)
    assert served(pace, 0.0, cost) < 1.03
    assert served(pace, 0.0, cost) < 1.02  # the next request knows


@pytest.mark.parametrize(("share", "most"), [(1.0, 0.4), (0.9, 0.5), (0.6, 0.8)])
def test_drafts_that_are_often_right_pay(share: float, most: float):
    assert served(trained(0.15), share, 0.15) < most


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("cost", [0.1, 0.3, 0.6, 1.0])
def test_never_much_slower_than_without(share: float, cost: float):
    assert served(trained(cost), share, cost) < 1.05


def test_it_comes_back_to_a_request_that_became_predictable():
    pace = trained(0.15)
    served(pace, 0.0, 0.15)
    assert served(pace, 1.0, 0.15) < 0.6


def test_it_comes_back_after_a_slow_spell():
    """Where one draft never pays, and four do: drafts of a head cost something by themselves."""
    pace, course = Pace(4), Course()
    for _ in range(4):
        pace.note_step(1, 0, 1.0)
        pace.note_step(1, 4, 9.0)
        pace.note_drafts(course, 4, 4)
    lengths = []
    for _ in range(2000):
        length = 0 if pace.rests else pace.lengths([course], [pace.most([course])])[0]
        if length:
            pace.note_drafts(course, length, length)
        pace.note_step(1, length, 2.5 + 0.1 * length if length else 1.0)
        lengths.append(length)
    assert 0 < lengths.index(4) < 600
    assert set(lengths[-500:]) == {4}


def test_drafts_that_are_made_at_once_are_all_tried():
    """Three take as long as eight: from what three took, eight are known to pay."""

    def next_length(drafts_at_once: bool) -> int:
        pace, course = Pace(8, drafts_at_once=drafts_at_once), Course()
        for _ in range(4):
            pace.note_step(1, 0, 1.0)
            pace.note_step(1, 3, 4.2)
            pace.note_drafts(course, 3, 3)
        return pace.lengths([course], [8])[0]

    assert next_length(drafts_at_once=True) == 8
    assert next_length(drafts_at_once=False) == 0


def test_a_batch_pays_for_its_slowest_part():
    """Where drafts of many rows cost much, there are none; alone, the same request has some."""
    pace = trained(0.1)
    for _ in range(4):
        for length in range(5):
            pace.note_step(32, length, 1.0 + 1.0 * length)
    likely, hardly = Course(), Course()
    for _ in range(8):
        pace.note_drafts(likely, 4, 3)
        pace.note_drafts(hardly, 4, 0)
    assert pace.lengths([likely], [4]) == [4]
    assert pace.lengths([likely] * 32, [4] * 32) == [0] * 32
    [first, second] = trained(0.1, num_seqs=2).lengths([likely, hardly], [4, 4])
    assert first > 0 == second


def test_the_first_step_of_a_kind_is_not_counted():
    """It may have been compiled."""
    pace = Pace(4)
    pace.note_step(1, 0, 60.0)
    for _ in range(3):
        assert not pace.is_measured(1)
        pace.note_step(1, 0, 1.0)
    assert pace.is_measured(1)
    assert not pace.is_measured(2)


def test_ranks_that_share_a_model_decide_alike():
    """Whatever their clocks say."""
    lengths = []
    for slow in (1.0, 100.0):
        pace, course = Pace(4, measures=False), Course()
        assert pace.is_measured(1)
        for _ in range(5):
            pace.note_step(1, 4, slow)
            pace.note_drafts(course, 4, 2)
        lengths.append(pace.lengths([course], [4]))
    assert lengths[0] == lengths[1] != [0]


def test_expected_tokens():
    assert expected(0.0, 4) == 1.0
    assert expected(1.0, 4) == 5.0
    assert expected(0.5, 2) == 1.75
