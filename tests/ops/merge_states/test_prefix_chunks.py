"""Attention to a prefix in chunks, merged, is attention to all of it at once.

This is how multi-head latent attention serves a long prefix: the new tokens attend causally to one
another, then to each chunk of the prefixes, and the results are merged by their log-sum-exp. A
chunk holds pieces of any sequences, so some sequences have no key in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.contract import assert_within_budget, impls_on, skip_reason
from tests.ops.pages import offsets
from torch_hybrid.ops.merge_states import merge_states
from torch_hybrid.ops.merge_states import op as merge_op
from torch_hybrid.ops.merge_states import reference as merge_reference
from torch_hybrid.ops.ragged_attention import op as ragged_op
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse, reference

IMPLS = impls_on("cpu", ragged_op.IMPLEMENTATIONS)
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


@dataclass(frozen=True)
class Ops:
    """Attention and merge by one implementation, or by the references."""

    attention: Callable[..., tuple[Tensor, Tensor]]
    merge: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, impl: str) -> Ops:
        attention = partial(ragged_attention_with_lse, impl=impl)
        return cls(attention, partial(merge_states, impl=impl))


REFERENCES = Ops(
    lambda *rows, **options: reference.ragged_attention_with_lse(
        ragged_op.RaggedAttentionWithLse(*rows, **options, impl="")
    ),
    lambda *states: merge_reference.merge_states(merge_op.MergeStates(*states, impl="")),
)


def attend(
    batch: Batch, ranges: list[tuple[int, int]], causal: bool, ops: Ops
) -> tuple[Tensor, Tensor]:
    """The new tokens of each sequence n to its keys at positions ``ranges[n]``."""
    rows = torch.cat([batch.key_rows(n, *own) for n, own in enumerate(ranges)])
    return ops.attention(
        batch.q,
        batch.k[rows],
        batch.v[rows],
        offsets(batch.new_lens),
        offsets([end - begin for begin, end in ranges]),
        causal=causal,
        scale=SCALE,
    )


def in_one_shot(batch: Batch, ops: Ops) -> tuple[Tensor, Tensor]:
    """The new tokens to the prefix and to one another."""
    lengths = [old + new for old, new in zip(batch.prefix_lens, batch.new_lens, strict=True)]
    return attend(batch, [(0, length) for length in lengths], True, ops)


def in_chunks(batch: Batch, budget: int, ops: Ops) -> tuple[Tensor, Tensor]:
    """The new tokens first, then the prefixes, ``budget`` tokens at a time in sequence order."""
    ends = [prefix + new for prefix, new in zip(batch.prefix_lens, batch.new_lens, strict=True)]
    state = attend(batch, list(zip(batch.prefix_lens, ends, strict=True)), True, ops)
    starts = [0]
    for prefix in batch.prefix_lens:
        starts.append(starts[-1] + prefix)
    for chunk in range(0, starts[-1], budget):
        pieces = [
            (max(chunk - start, 0), max(min(chunk + budget - start, prefix), 0))
            for start, prefix in zip(starts, batch.prefix_lens, strict=False)
        ]
        pieces = [(min(begin, end), end) for begin, end in pieces]
        state = ops.merge(*state, *attend(batch, pieces, False, ops))
    return state


def check(new_lens: list[int], prefix_lens: list[int], budget: int, impl: str) -> None:
    """Both ways against one shot in float64, each within what its own way costs the references."""
    batch = make_batch(new_lens, prefix_lens)
    double = replace(batch, q=batch.q.double(), k=batch.k.double(), v=batch.v.double())
    exact = in_one_shot(double, REFERENCES)
    for run in (in_one_shot, partial(in_chunks, budget=budget)):
        actual, rounded = run(batch, ops=Ops.of(impl)), run(batch, ops=REFERENCES)
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
    # So many rows that the references' largest error, of which the budget is made, is no accident.
    new_lens[0], prefix_lens[0] = 17, 300
    check(new_lens, prefix_lens, 128, impl)


def test_a_long_prefix(impl: str) -> None:
    """A base-2 LSE taken for a natural one is off by 44 %, and it grows with the keys."""
    check([3], [4096], 512, impl)
