"""Under FSDP2 a twin has the losses that it has on one rank."""

from __future__ import annotations

import pytest

from tests.parallel.processes import run_ranks
from tests.training.sharded import train


def test_two_ranks_have_the_losses_of_one():
    (alone,) = run_ranks(train, 1)
    both = run_ranks(train, 2)
    assert alone.error is None
    assert [each.error for each in both] == [None, None]
    assert alone.result[-1] < alone.result[0]
    for each in both:
        assert each.result == pytest.approx(alone.result, rel=1e-5)
