"""Sizes that steps are padded to."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_hybrid.graphs.stepping.buckets import geometric, round_up, token_sizes


@given(st.integers(1, 64), st.integers(1, 5000))
def test_geometric(first: int, last: int):
    sizes = geometric(first, last)
    assert sizes[-1] == last
    assert all(a < b for a, b in pairwise(sizes))
    assert all(b <= 2 * a for a, b in pairwise(sizes))


@given(st.integers(64, 9000))
def test_token_sizes(max_tokens: int):
    sizes = token_sizes(max_tokens)
    assert sizes[-1] == max_tokens
    assert list(sizes) == sorted(set(sizes))
    assert all(size % 16 == 0 for size in sizes[:-1])


@given(st.integers(64, 4096), st.data())
def test_padding_is_bounded(max_tokens: int, data: st.DataObject):
    size = data.draw(st.integers(1, max_tokens))
    padded = round_up(size, token_sizes(max_tokens))
    assert size <= padded <= max_tokens
    assert padded - size < 16 or (size > 256 - 16 and padded - size < 64)


def test_too_large():
    with pytest.raises(ValueError, match=r"^size 65 is over the largest bucket 64$"):
        round_up(65, token_sizes(64))
