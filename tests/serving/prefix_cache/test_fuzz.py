"""The fuzz for a bounded time; ``python -m tests.serving.prefix_cache.fuzz`` runs it for longer."""

import pytest

from tests.serving.prefix_cache.fuzz import WITH_HEAD, WITH_IMAGES, PrefixFuzz


@pytest.mark.parametrize(
    ("family", "seed"), [("qwen3_next", 3), ("qwen3", 2), (WITH_HEAD, 11), (WITH_IMAGES, 10)]
)
def test_nothing_is_lost_and_no_token_is_wrong(family: str, seed: int):
    fuzz = PrefixFuzz(family, seed)
    for _ in range(14):
        fuzz.round()
    fuzz.close()
    assert fuzz.counts.requests > 20
    assert fuzz.counts.raised > 0
    assert fuzz.num_hits > 3
    assert fuzz.num_evictions > 3
    assert (fuzz.num_accepted > 3) == (fuzz.runner.max_drafts > 0)
