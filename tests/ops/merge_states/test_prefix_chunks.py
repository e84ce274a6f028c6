"""Attention to a prefix in chunks, merged, is attention to all of it at once.

This is how multi-head latent attention serves a long prefix: the new tokens attend causally to one
another, then to each chunk of the prefixes, and the results are merged by their log-sum-exp. A
chunk holds pieces of any sequences, so some sequences have no key in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.contract import assert_within_budget, skip_reason
from tests.ops.pages import offsets
from torch_hybrid.ops.merge_states import merge_states
from torch_hybrid.ops.merge_states import op as merge_op
from torch_hybrid.ops.ragged_attention import op as ragged_op
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse, reference

IMPLS = list(ragged_op.IMPLEMENTATIONS)
HEADS, HEAD_DIM, V_HEAD_DIM = 2, 48, 32
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True, kw_only=True)
class Batch:
    """New tokens and prefix of each sequence, all keys of a sequence in one row range."""

    new_lens: list[int]
    prefix_lens: list[int]
    q: Tensor
    k: Tensor
    v: Tensor

    def key_rows(self, n: int, begin: int, end: int) -> Tensor:
        """Rows of k and v at positions [begin, end) of sequence n."""
        first = sum(self.prefix_lens[:n]) + sum(self.new_lens[:n])
        return torch.arange(first + begin, first + end)


def make_batch(new_lens: list[int], prefix_lens: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(len(new_lens))
    num_new, num_keys = sum(new_lens), sum(new_lens) + sum(prefix_lens)
    return Batch(
        new_lens=new_lens,
        prefix_lens=prefix_lens,
        q=torch.randn(num_new, HEADS, HEAD_DIM, generator=generator) * 2,
        k=torch.randn(num_keys, HEADS, HEAD_DIM, generator=generator),
        v=torch.randn(num_keys, HEADS, V_HEAD_DIM, generator=generator),
    )


def attend(
    batch: Batch, ranges: list[tuple[int, int]], causal: bool, impl: str
) -> tuple[Tensor, Tensor]:
    """The new tokens of each sequence n to its keys at positions ``ranges[n]``."""
    rows = torch.cat([batch.key_rows(n, *own) for n, own in enumerate(ranges)])
    return ragged_attention_with_lse(
        batch.q,
        batch.k[rows],
        batch.v[rows],
        offsets(batch.new_lens),
        offsets([end - begin for begin, end in ranges]),
        causal=causal,
        scale=SCALE,
        impl=impl,
    )


def in_chunks(batch: Batch, budget: int, impl: str) -> tuple[Tensor, Tensor]:
    """The new tokens first, then the prefixes, ``budget`` tokens at a time in sequence order."""
    ends = [prefix + new for prefix, new in zip(batch.prefix_lens, batch.new_lens, strict=True)]
    state = attend(batch, list(zip(batch.prefix_lens, ends, strict=True)), True, impl)
    starts = [0]
    for prefix in batch.prefix_lens:
        starts.append(starts[-1] + prefix)
    for chunk in range(0, starts[-1], budget):
        pieces = [
            (max(chunk - start, 0), max(min(chunk + budget - start, prefix), 0))
            for start, prefix in zip(starts, batch.prefix_lens, strict=False)
        ]
        pieces = [(min(begin, end), end) for begin, end in pieces]
        state = merge_states(*state, *attend(batch, pieces, False, impl), impl=impl)
    return state


def check(new_lens: list[int], prefix_lens: list[int], budget: int, impl: str) -> None:
    batch = make_batch(new_lens, prefix_lens)
    lengths = [prefix + new for prefix, new in zip(prefix_lens, new_lens, strict=True)]
    cu_seqlens = (offsets(new_lens), offsets(lengths))
    options = {"causal": True, "scale": SCALE}
    exact = reference.ragged_attention_with_lse(
        batch.q.double(), batch.k.double(), batch.v.double(), *cu_seqlens, **options
    )
    rounded = reference.ragged_attention_with_lse(batch.q, batch.k, batch.v, *cu_seqlens, **options)
    one_shot = attend(batch, [(0, length) for length in lengths], True, impl)
    chunked = in_chunks(batch, budget, impl)
    for actual in (one_shot, chunked):
        assert_within_budget(actual[0], exact[0], rounded[0])
        assert_within_budget(actual[1], exact[1], rounded[1])


@pytest.fixture(params=IMPLS, scope="module")
def impl(request: pytest.FixtureRequest) -> str:
    for implementations in (ragged_op.IMPLEMENTATIONS, merge_op.IMPLEMENTATIONS):
        if reason := skip_reason(implementations[request.param], "cpu"):
            pytest.skip(reason)
    return request.param


@settings(max_examples=30)
@given(
    seqs=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 150)), min_size=1, max_size=8),
    budget=st.integers(1, 200),
)
def test_random_splits(impl: str, seqs: list[tuple[int, int]], budget: int) -> None:
    check([new for new, _ in seqs], [prefix for _, prefix in seqs], max(budget, 8), impl)


@pytest.mark.parametrize("num_seqs", [1, 5, 64])
def test_many_sequences(impl: str, num_seqs: int) -> None:
    """A few long prefixes among short ones and none."""
    draw = random.Random(num_seqs)
    new_lens = [draw.choice([1, 2, 7, 17]) for _ in range(num_seqs)]
    prefix_lens = [draw.choice([0, 0, 1, 16, 40, 300]) for _ in range(num_seqs)]
    prefix_lens[0] = 300
    check(new_lens, prefix_lens, 128, impl)


def test_a_long_prefix(impl: str) -> None:
    """A base-2 LSE taken for a natural one is off by 44 %, and it grows with the keys."""
    check([3], [4096], 512, impl)
