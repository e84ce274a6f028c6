"""The fuzz for a bounded time; ``python -m tests.serving.fuzz`` runs it for longer."""

import pytest

from tests.serving.fuzz import FAMILIES, Fuzz


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_lost_and_no_token_is_wrong(family):
    fuzz = Fuzz(family, seed=0)
    for _ in range(8):
        fuzz.round()
    assert fuzz.counts.requests > 12
    assert fuzz.counts.raised > 0
    assert {"length", "error"} <= set(fuzz.counts.by_reason)
