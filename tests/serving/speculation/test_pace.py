"""How long drafts are, by what was accepted and by what steps took: on a clock of the tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest

from torch_hybrid.serving.speculation.acceptance import HOPE, Acceptance, expected_tokens
from torch_hybrid.serving.speculation.costs import LONG, StepCosts
from torch_hybrid.serving.speculation.pace import SHARE, START, Pace

Cost = Callable[[int], float]  # of the longest draft of a step, in plain steps
# A lookup, a small model, a large one, and heads whose drafts cost alike from two on.
COSTS: dict[str, Cost] = {
    "lookup": lambda length: 1.0 + 0.05 * length,
    "small model": lambda length: 1.0 + 0.2 * length,
    "large model": lambda length: 1.0 + 0.6 * length,
    "head": lambda length: [1.0, 1.8][length] if length < 2 else 3.9 + 0.05 * length,
    "cheap head": lambda length: 1.4 + 0.02 * length if length else 1.0,
}


def demo_head(length: int) -> float:
    """In plain steps, as the demo's model and head take them with one thread."""
    return [1.0, 1.8][length] if length < 2 else 5.5 + 0.07 * length


def make_pace(num_drafts: int = 8, *, of: str = "", measures: bool = True) -> Pace:
    at_once = of.endswith("head")
    return Pace(num_drafts, StepCosts(num_drafts, measures=measures, drafts_at_once=at_once))


def trained(cost: float, *, num_seqs: int = 1) -> Pace:
    """A pace for which a draft adds ``cost`` to the time of a step."""
    costs = StepCosts(4)
    for _ in range(4):
        for length in range(5):
            costs.note(num_seqs, length, 1.0 + cost * length, 0)
    return Pace(4, costs)


def served(
    pace: Pace,
    is_right: Callable[[int], bool],
    cost: Cost,
    num_tokens: int = 400,
    lengths: list[int] | None = None,
) -> float:
    """The time of a request, over that without drafts; ``is_right`` is a draft for its token."""
    course, size, seconds = pace.new_course(), 0, 0.0
    most = pace.num_drafts
    while size < num_tokens:
        is_plain = pace.rests or not pace.is_measured(1)
        [length] = [0] if is_plain else pace.lengths([course], [most])
        right = next(n for n in count() if n == length or not is_right(size + n))
        if length:
            pace.note_drafts(course, length, right)
        pace.note_step(1, length, 1 + right, cost(length))
        seconds += cost(length)
        size += 1 + right
        if lengths is not None:
            lengths.append(length)
    return seconds / size


def share(of: float, seed: int = 0) -> Callable[[int], bool]:
    """Of drafts, that are right."""
    rng = random.Random(seed)
    return lambda _: rng.random() < of


def growing(cost: float) -> Cost:
    return lambda length: 1.0 + cost * length


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_costs_a_percent(name: str, seed: int):
    """Requests and stretches of any acceptance, and one that is made to be as bad as can be: right
    until drafts are trusted, and then wrong."""
    rng, pace, tokens, seconds = random.Random(seed), make_pace(of=name), 0, 0.0
    trusted = 0
    while tokens < 4000:
        size = rng.choice([3, 20, 100, 500])
        is_right = share(rng.choice([0.0, 0.0, 0.2, 0.5, 0.8, 0.95, 1.0]), rng.random())
        if seed == 0:
            trusted += 1
            is_right = lambda _, good=trusted % 2: bool(good)  # noqa: E731
        seconds += size * served(pace, is_right, COSTS[name], size)
        tokens += size
        # The last step of a stretch may go beyond it, and one may be tried that costs much.
        assert seconds < (1.0 + SHARE) * tokens + START + 2 * pace.num_drafts
    assert seconds < 1.03 * tokens


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.85, 0.9, 0.99])
def test_it_finds_the_best_length(name: str, rate: float):
    """Within a tenth of the best that one length for all steps can do, over many requests."""
    cost, seconds = COSTS[name], 0.0
    for seed in range(2):
        pace, is_right = make_pace(of=name), share(rate, seed)
        seconds += sum(served(pace, is_right, cost, 256) for _ in range(10)) / 20
    tokens = expected_tokens([rate] * 8)
    assert seconds < 1.1 * min(cost(length) / tokens[length] for length in range(9))


def test_what_requests_taught_is_known_of_the_next():
    """It tries one draft, then all of them at once; and none where they went wrong."""
    for rate, expected in ((1.0, [0, 0, 0, 1, 1, 1, 8, 8]), (0.0, [0, 0, 0, 1])):
        pace, lengths = make_pace(of="head"), []
        served(pace, share(rate), COSTS["head"], 100, lengths)
        assert lengths[: len(expected)] == expected
        lengths.clear()
        served(pace, share(rate), COSTS["head"], 20, lengths)
        assert set(lengths) == {8 if rate else 0}


def test_a_clock_that_lags_now_and_then():
    """The fastest of some steps counts."""
    rng, pace = random.Random(0), make_pace(of="head")
    slow = lambda length: COSTS["head"](length) * rng.choice([1.0, 1.1, 1.1, 8.0])  # noqa: E731
    lengths: list[int] = []
    served(pace, share(0.99), slow, 4000, lengths)
    assert lengths.count(8) > 0.9 * len(lengths)


def short_answers(rate: float, seed: int) -> float:
    """The time of an engine's first 24 answers of 63 tokens, over that without drafts, on a machine
    with other work: one step in fifty is measured many times as long, and the first step of each
    length takes half as long again."""
    rng, pace, seconds = random.Random(seed), make_pace(12, of="head"), 0.0
    sizes: set[int] = set()
    for _ in range(24):
        course, size = pace.new_course(), 0
        while size < 63:
            most = min(12, 62 - size)
            is_plain = pace.rests or not pace.is_measured(1) or not most
            [length] = [0] if is_plain else pace.lengths([course], [most])
            right = next(n for n in count() if n == length or rng.random() >= rate)
            took = demo_head(length) * (1.0 if length in sizes else 1.5)
            slow = rng.uniform(2.0, 20.0) if rng.random() < 0.02 else 1.0
            measured = took * slow * (1.0 + abs(rng.gauss(0.0, 0.1)))
            if length:
                pace.note_drafts(course, length, right)
            pace.note_step(1, length, 1 + right, measured, is_first=length not in sizes)
            sizes.add(length)
            size, seconds = size + 1 + right, seconds + took
    return seconds / (24 * 63)


@pytest.mark.parametrize(("rate", "most"), [(0.95, 0.9), (0.97, 0.8), (0.99, 0.6)])
def test_a_good_head_is_not_put_to_rest(rate: float, most: float):
    """Whatever becomes of its first drafts, and whatever the clock says: the slowest of many."""
    assert max(short_answers(rate, seed) for seed in range(100)) < most


@pytest.mark.parametrize("cost", [0.05, 0.15, 0.5, 1.5])
def test_drafts_that_are_never_right_cost_little(cost: float):
    pace = trained(cost)
    first, *others = (served(pace, share(0.0), growing(cost)) for _ in range(5))
    assert first < 1.03
    assert sum(others) / 4 < 1.02  # which know of the first


@pytest.mark.parametrize(("right", "most"), [(1.0, 0.4), (0.9, 0.5), (0.6, 0.8)])
def test_drafts_that_are_often_right_pay(right: float, most: float):
    assert served(trained(0.15), share(right), growing(0.15)) < most


@pytest.mark.parametrize("right", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("cost", [0.1, 0.3, 0.6, 1.0])
def test_never_much_slower_than_without(right: float, cost: float):
    assert served(trained(cost), share(right), growing(cost)) < 1.05


def test_it_comes_back_to_a_request_that_became_predictable():
    pace = trained(0.15)
    served(pace, share(0.0), growing(0.15))
    assert served(pace, share(1.0), growing(0.15)) < 0.6


def test_it_comes_back_after_a_slow_spell():
    """Where one draft never pays, and four do: drafts of a head cost something by themselves."""
    pace = make_pace(4, of="head")
    for _ in range(4):
        pace.note_step(1, 0, 1, 1.0)
        pace.note_step(1, 4, 5, 9.0)
    lengths: list[int] = []
    steps = lambda length: 2.5 + 0.1 * length if length else 1.0  # noqa: E731
    served(pace, share(1.0), steps, 4000, lengths)
    assert 0 < lengths.index(4) < 600
    assert set(lengths[-400:]) == {4}


def test_a_batch_pays_for_its_slowest_part():
    """Where drafts of many rows cost much, there are none; alone, the same request has some."""
    pace = trained(0.1)
    for _ in range(4):
        for length in range(5):
            pace.note_step(32, length, 32 * (1 + length), 1.0 + 1.0 * length)
    likely, hardly = pace.new_course(), pace.new_course()
    for _ in range(8):
        pace.note_drafts(likely, 4, 3)
        pace.note_drafts(hardly, 4, 0)
    assert pace.lengths([likely], [4]) == [3]  # the fourth was always wrong
    assert pace.lengths([likely] * 32, [4] * 32) == [0] * 32
    [first, second] = trained(0.1, num_seqs=2).lengths([likely, hardly], [4, 4])
    assert first > 0 == second


def test_too_few_drafts_begin_no_rest():
    """At the end of a request, or where a lookup finds little: the next step is another matter."""
    pace = make_pace(of="head")
    for _ in range(4):
        for length in (0, 1, 8):
            pace.note_step(1, length, 1 + length, COSTS["head"](length))
    course = pace.new_course()
    for _ in range(9):
        pace.note_drafts(course, 1, 0)
        pace.note_drafts(pace.new_course(), 8, 8)
    assert pace.lengths([course], [2]) == [0]
    assert not pace.rests
    assert pace.lengths([pace.new_course()], [8]) == [8]


def test_the_first_step_of_a_kind_is_not_counted():
    """It may have been compiled."""
    pace = make_pace(4)
    pace.note_step(1, 0, 1, 60.0)
    for _ in range(2):
        assert not pace.is_measured(1)
        pace.note_step(1, 0, 1, 1.0)
    assert pace.is_measured(1)
    assert not pace.is_measured(2)


def test_the_first_step_of_a_size_is_charged_and_says_nothing_of_others():
    """Each step with drafts is the first of its size, takes long, and none of them is right."""
    pace = make_pace(8)
    for _ in range(4):
        pace.note_step(1, 0, 1, 9.0, is_first=True)
        assert not pace.is_measured(1)
    for _ in range(3):
        pace.note_step(1, 0, 1, 1.0)
    num_drafted = 0
    for _ in range(1000):
        (length,) = (0,) if pace.rests else pace.lengths([pace.new_course()], [8])
        pace.note_step(1, length, 1, 5.0 if length else 1.0, is_first=length > 0)
        num_drafted += length > 0
    assert 1 <= num_drafted <= 5  # each loses 4 plain steps, of 3 and of 1 % of 1000


def test_ranks_that_share_a_model_decide_alike():
    """Whatever their clocks say."""
    lengths = []
    for slow in (1.0, 100.0):
        pace = make_pace(4, measures=False)
        course = pace.new_course()
        assert pace.is_measured(1)
        for _ in range(5):
            pace.note_drafts(course, 4, 2)
            pace.note_step(1, 4, 3, slow)
        lengths.append(pace.lengths([course], [4]))
    assert lengths[0] == lengths[1] != [0]


def test_costs_of_lengths_that_were_not_measured():
    costs = StepCosts(8)
    assert costs.of(1, 0) == pytest.approx([1.0 + 0.1 * length for length in range(9)])
    for _ in range(3):
        for length, seconds in ((0, 2.0), (2, 3.0), (6, 7.0)):
            costs.note(1, length, seconds, 0)
    assert costs.of(1, 0)[:7] == pytest.approx([1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5])
    assert costs.of(1, 0)[7:] == pytest.approx([3.5 + 2.5 / 6, 3.5 + 2 * 2.5 / 6])
    assert costs.of(3, 0) != costs.of(1, 0)


def test_shorter_drafts_cost_no_more_than_longer_ones():
    """They were measured when the machine had other work."""
    costs = StepCosts(4)
    for _ in range(3):
        for length, seconds in ((0, 1.0), (2, 9.0), (4, 3.0)):
            costs.note(1, length, seconds, 0)
    assert costs.of(1, 0) == pytest.approx([1.0, 2.0, 3.0, 3.0, 3.0])


def test_costs_of_drafts_that_are_made_at_once():
    costs = StepCosts(8, drafts_at_once=True)
    for _ in range(3):
        for length, seconds in ((0, 1.0), (3, 4.2)):
            costs.note(1, length, seconds, 0)
    assert costs.of(1, 0)[2:] == [4.2] * 7


def test_costs_are_believed_less_after_a_while():
    costs = StepCosts(1)
    for _ in range(3):
        costs.note(1, 0, 1.0, 0)
        costs.note(1, 1, 9.0, 0)
    found = [costs.of(1, now)[1] for now in (0, LONG - 1, LONG, 2 * LONG)]
    assert found == [9.0, 9.0, 5.0, 3.0]
    assert costs.charged(1, 1) == 9.0


def test_acceptance_is_by_place_and_fades():
    one = Acceptance(3, fading=0.9)
    assert one.rates(0) == [HOPE] * 3
    for _ in range(30):
        one.note(3, 1, 0)  # the second is always wrong, and the third is never known
    first, second, third = one.rates(0)
    assert first > HOPE > 0.2 > second
    assert third == pytest.approx(second)
    assert one.rates(500) == pytest.approx([HOPE] * 3)
    assert one.rates(500, [0.1, 0.2, 0.3]) == pytest.approx([0.1, 0.2, 0.3])


def test_expected_tokens():
    assert expected_tokens([0.0] * 4)[4] == 1.0
    assert expected_tokens([1.0] * 4) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert expected_tokens([0.5, 0.5]) == [1.0, 1.5, 1.75]
