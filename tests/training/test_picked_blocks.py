"""Tokens of packed rows pick and see blocks of their own sequences, as these alone do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.training.twins import furthest, grads, make_pair, make_rows
from torch_hybrid.ops.select_blocks.reference import scores_of
from torch_hybrid.training.picked_blocks import attend_to_picked, over_block, pick_blocks

BLOCK, TOP_K = 4, 3
OFFSETS = torch.tensor([0, 29, 32, 33, 40, 60, 78, 80])  # two rows of 40 tokens
PACKING = th.Packing(OFFSETS)


def sequences() -> Iterator[slice]:
    yield from (slice(*pair) for pair in pairwise(OFFSETS.tolist()))


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def picks_one_by_one(q: Tensor, keys: Tensor, weights: Tensor | None) -> list[set[int]]:
    """Choose the first tokens, in all rows, of the blocks that each token picks."""
    picks = []
    for seq in sequences():
        for token in range(seq.start, seq.stop):
            ends = range(seq.start + BLOCK - 1, token + 1, BLOCK)
            scores = scores_of(q[token], None if weights is None else weights[token], keys[ends])
            best = scores.sort(descending=True, stable=True).indices[:TOP_K]
            picks.append({ends[block] - BLOCK + 1 for block in best.tolist()})
    return picks


def picks_packed(q: Tensor, keys: Tensor, weights: Tensor | None) -> tuple[Tensor, list[set[int]]]:
    """Mark blocks [2, 40, P] as the training twins do, and name their first tokens too."""
    rows = (each if each is None else each.unflatten(0, (2, 40)) for each in (q, keys, weights))
    picked = pick_blocks(*rows, PACKING, block_size=BLOCK, top_k=TOP_K)
    ends = [(PACKING.positions % BLOCK == BLOCK - 1).view(2, 40)[row].nonzero() for row in (0, 1)]
    firsts = [(each.flatten() + 40 * row - BLOCK + 1).tolist() for row, each in enumerate(ends)]
    return picked, [
        {firsts[token // 40][block] for block in picked[token // 40, token % 40].nonzero()}
        for token in range(80)
    ]


@pytest.mark.parametrize("heads", ["of one weight", "with weights", "that tie"])
def test_picks_are_those_of_each_sequence_alone(heads: str):
    q, keys, weights = draw(80, 2, 8), draw(80, 8, seed=1), draw(80, 2, seed=2)
    if heads == "that tie":  # most blocks have the score 0
        q, keys = q.round(), keys.clamp(max=0.0).round()
    given = (q, keys, weights if heads == "with weights" else None)
    expected = picks_one_by_one(*given)
    assert picks_packed(*given)[1] == expected
    assert max(map(len, expected)) == TOP_K < 29 // BLOCK


def test_tokens_attend_to_picked_blocks_and_what_follows_complete_ones():
    q, k, v = draw(80, 4, 8), draw(80, 2, 8, seed=1), draw(80, 2, 6, seed=2)
    picked, firsts = picks_packed(draw(80, 2, 8), draw(80, 8, seed=1), None)
    rows = [each.requires_grad_() for each in (q, k, v)]
    out = attend_to_picked(*rows, picked, PACKING, block_size=BLOCK, scale=0.3)
    expected = []
    for seq in sequences():
        for token in range(seq.start, seq.stop):
            tail = token - (token - seq.start + 1) % BLOCK + 1
            seen = [first + i for first in sorted(firsts[token]) for i in range(BLOCK)]
            seen += range(tail, token + 1)
            weights = torch.einsum("hgd,nhd->hgn", q[token].view(2, 2, 8), k[seen]) * 0.3
            mixed = torch.einsum("hgn,nhd->hgd", weights.softmax(-1), v[seen])
            expected.append(mixed.flatten(0, 1))
    torch.testing.assert_close(out, torch.stack(expected))
    made, wanted = (
        torch.autograd.grad(each.sin().sum(), rows) for each in (out, torch.stack(expected))
    )
    torch.testing.assert_close(made, wanted)


def test_windows_end_at_their_tokens():
    x = torch.arange(1.0, 6.0).view(1, 5, 1)
    assert over_block(x, 3)[0, :, 0].tolist() == [
        [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]
    ]  # fmt: skip


SHARED = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
}


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen4_exp", {}), ("glm5_next", {**SHARED, "indexer_types": ["full", "full", "shared"]})],
)
def test_rows_of_several_sequences_train_as_these_alone(family: str, options: dict[str, object]):
    theirs, ours = make_pair(family, **options)
    alone = make_rows([45, 15, 1, 33, 26])
    ids = torch.cat(alone, 1).view(2, 60)
    packing = th.Packing(torch.tensor([0, 45, 60, 61, 94, 120]))
    logits = ours(ids, packing=packing).logits.flatten(0, 1)
    single = torch.cat([theirs(row, use_cache=False).logits[0] for row in alone])
    torch.testing.assert_close(logits, single, atol=2e-4, rtol=2e-4)
    made, expected = (grads(m, each.sin().sum()) for m, each in ((ours, logits), (theirs, single)))
    assert furthest(made, expected) < 2e-4
    assert not any("indexer" in name for name in made)  # transformers has none either
