"""Few ids and many, which are looked at in different ways, against a count of every hold."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from torch_hybrid.caches.allocator import Allocator

CAPACITY = 200


class Books:
    """The holds of each id, one by one."""

    def __init__(self) -> None:
        self.holds = {True: Counter[int](), False: Counter[int]()}  # to spare, and firm

    @property
    def in_use(self) -> set[int]:
        return {*+self.holds[True], *+self.holds[False]}

    def agree_with(self, allocator: Allocator) -> None:
        firm, spare = +self.holds[False], +self.holds[True]
        assert allocator.num_free == CAPACITY - len(self.in_use)
        assert allocator.num_spare == len(spare.keys() - firm.keys())
        for ids in (range(1, CAPACITY + 1), range(1, 12)):
            assert allocator.count_spare(ids) == sum(i in spare and i not in firm for i in ids)
            assert allocator.count_firm_once(ids) == sum(firm[i] == 1 for i in ids)


@pytest.mark.parametrize("seed", range(4))
def test_holds_are_counted(seed: int):
    rng = random.Random(seed)
    allocator, books = Allocator(CAPACITY, unit="page", limit="pages"), Books()
    for _ in range(120):
        match rng.choice(["take", "share", "give back"]):
            case "take":
                taken = allocator.take(rng.choice([0, 1, 5, 60]) % (1 + allocator.num_free))
                assert not books.in_use.intersection(taken)
                books.holds[False].update(taken)
            case "share":
                spare, known = rng.random() < 0.5, sorted(books.in_use)
                ids = rng.sample(known, rng.randint(0, len(known)))
                allocator.share(ids, spare=spare)
                books.holds[spare].update(ids)
            case "give back":
                spare = rng.random() < 0.5
                known = sorted(+books.holds[spare])
                ids = rng.sample(known, rng.randint(0, len(known)))
                allocator.give_back(ids, spare=spare)
                books.holds[spare].subtract(ids)
        books.agree_with(allocator)


@pytest.mark.parametrize("count", [3, 100])
def test_a_hold_of_the_other_kind_is_not_given_back(count: int):
    allocator = Allocator(CAPACITY, unit="page", limit="pages")
    taken = allocator.take(count)
    with pytest.raises(AssertionError):
        allocator.give_back(taken, spare=True)
    allocator.share(taken, spare=True)
    allocator.give_back(taken)
    with pytest.raises(AssertionError):
        allocator.give_back(taken)
    allocator.give_back(taken, spare=True)
    assert allocator.num_free == CAPACITY


@pytest.mark.parametrize("wrong", [-1, 0, 151, CAPACITY + 1])
def test_many_ids_are_given_back_together_or_not_at_all(wrong: int):
    allocator = Allocator(CAPACITY, unit="page", limit="pages")
    taken = allocator.take(150)
    with pytest.raises(ValueError, match=f"page {wrong} is not in use"):
        allocator.give_back([*taken, wrong])
    with pytest.raises(ValueError, match="given back twice in one call"):
        allocator.give_back([*taken, taken[7]])
    assert allocator.num_free == CAPACITY - 150
    allocator.give_back(taken)
    assert sorted(allocator.take(CAPACITY)) == list(range(1, CAPACITY + 1))
