"""The fuzz for a bounded time; ``python -m tests.prefix_cache.fuzz`` runs it for longer."""

import pytest

from tests.prefix_cache.fuzz import PrefixFuzz


@pytest.mark.parametrize(("family", "seed"), [("falcon_h1", 6), ("qwen3", 2)])
def test_nothing_is_lost_and_no_token_is_wrong(family: str, seed: int):
    fuzz = PrefixFuzz(family, seed)
    for _ in range(10):
        fuzz.round()
    fuzz.close()
    assert fuzz.counts.requests > 20
    assert fuzz.counts.raised > 0
    assert fuzz.num_hits > 3
    assert fuzz.num_evictions > 3
    assert (fuzz.num_accepted > 3) == (fuzz.runner.max_drafts > 0)
