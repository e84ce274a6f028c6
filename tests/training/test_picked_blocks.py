"""Tokens of packed rows pick and see blocks of their own sequences, as these alone do."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.training.twins import furthest, grads, make_pair, make_rows
from torch_hybrid.ops.select_blocks.reference import scores_of
from torch_hybrid.training import picked_blocks
from torch_hybrid.training.picked_blocks import over_block, pick_blocks

BLOCK, TOP_K = 4, 3
OFFSETS = torch.tensor([0, 29, 32, 33, 40, 60, 78, 80])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def picks_one_by_one(q: Tensor, keys: Tensor, weights: Tensor | None) -> list[list[int]]:
    """Choose the blocks of each token in its sequence."""
    picks = []
    for start, end in pairwise(OFFSETS.tolist()):
        for token in range(start, end):
            last = range(start + BLOCK - 1, token + 1, BLOCK)
            scores = scores_of(q[token], None if weights is None else weights[token], keys[last])
            best = scores.sort(descending=True, stable=True).indices[:TOP_K]
            picks.append([*best.sort().values.tolist(), *[-1] * TOP_K][:TOP_K])
    return picks


@pytest.mark.parametrize("pages", [64, 2])
@pytest.mark.parametrize("heads", ["of one weight", "with weights", "that tie"])
def test_picks_are_those_of_each_sequence_alone(
    heads: str, pages: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(picked_blocks, "_BLOCKS", pages)
    q, keys, weights = draw(80, 2, 16, seed=0), draw(80, 16, seed=1), draw(80, 2, seed=2)
    if heads == "that tie":  # most blocks have the score 0
        q, keys = q.round(), keys.clamp(max=0.0).round()
    given = (q, keys, weights if heads == "with weights" else None)
    expected = picks_one_by_one(*given)
    picked = pick_blocks(*given, th.Packing(OFFSETS), block_size=BLOCK, top_k=TOP_K)
    assert picked.tolist() == expected
    assert max(map(max, expected)) > TOP_K  # so that some are not picked


def test_windows_end_at_their_tokens():
    x = torch.arange(1.0, 6.0)[:, None]
    assert over_block(x, 3)[:, 0].tolist() == [
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
    alone = make_rows([45, 25, 1, 23, 26], seed=4)
    assert nearest_limit(theirs, alone) > 1e-4  # of nearer ones, rounding switches gradients
    ids = torch.cat(alone, 1).view(2, 60)
    packing = th.Packing(torch.tensor([0, 45, 70, 71, 94, 120]))  # one is in both rows
    logits = ours(ids, packing=packing).logits.flatten(0, 1)
    single = torch.cat([theirs(row, use_cache=False).logits[0] for row in alone])
    torch.testing.assert_close(logits, single, atol=2e-4, rtol=2e-4)
    made, expected = (grads(m, each.sin().sum()) for m, each in ((ours, logits), (theirs, single)))
    assert furthest(made, expected) < 2e-4
    assert not any("indexer" in name for name in made)  # transformers has none either


def nearest_limit(model: Any, rows: list[Tensor]) -> float:
    """Find how near what experts multiply comes to their limit, where its gradient jumps to 0."""
    limit: float = model.config.get_text_config().to_dict().get("swiglu_limit", inf)
    distances = [inf]

    def watch(experts: Any, given: tuple[Tensor, ...]) -> None:
        hidden, picked = given[:2]
        gate, up = torch.einsum("td,tknd->tkn", hidden, experts.gate_up_proj[picked]).chunk(2, -1)
        distances.extend(float((x - limit).abs().min()) for x in (gate, up.abs()))

    hooks = [
        module.register_forward_pre_hook(watch)
        for module in model.modules()
        if limit < inf and type(module).__name__.endswith("Experts")
    ]
    with torch.no_grad():
        for row in rows:
            model(row, use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(distances)
