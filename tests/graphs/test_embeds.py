"""Rows in the place of embeddings: one graph for steps with and without, whatever they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.tiny_models import FEWEST_LAYERS, VOCAB_SIZE, make_hybrid, make_model

SIZES = {"max_seqs": 6, "max_tokens": 128, "kv_tokens": 512, "takes_embeds": True}
WIDTH = 32


def tokens_of(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def own_rows(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model.hf_model.get_input_embeddings()(torch.tensor(tokens))


def given(model: Any, tokens: list[list[int]], places: list[int]) -> th.Embeds:
    """What the tokens at these places are embedded as."""
    packed = [token for own in tokens for token in own]
    return th.Embeds(rows=own_rows(model, [packed[p] for p in places]), places=places)


def blank(tokens: list[list[int]], places: list[int]) -> list[list[int]]:
    """Tokens, of which those at these places say nothing."""
    packed = iter(range(sum(map(len, tokens))))
    return [[0 if next(packed) in places else token for token in own] for own in tokens]


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "nemotron_h", "kimi_linear"])
def test_rows_stand_for_tokens(family: str):
    """To the last bit, in any family, in chunks and beside others."""
    model = th.adapt(make_model(family, **FEWEST_LAYERS[family]))
    runner = th.Runner(model, **SIZES, compile=False)
    seqs, twins = runner.new_sequences(2), runner.new_sequences(2)
    steps = [((20, 7), [0, 3, 19, 20]), ((5, 9), []), ((1, 1), [1])]
    for seed, (lengths, places) in enumerate(steps):
        tokens = tokens_of(seed, *lengths)
        expected = runner.extend(twins, tokens, logits="all")
        embeds = given(model, tokens, places) if places else None
        actual = runner.extend(seqs, blank(tokens, places), logits="all", embeds=embeds)
        if max(map(len, tokens)) > 1:  # else one of them decodes, by another graph
            assert torch.equal(actual, expected)
        else:
            assert torch.allclose(actual, expected, rtol=0, atol=2e-5 * expected.abs().max())


def rounds(runner: th.Runner, *, with_rows: bool) -> list[Tensor]:
    """Steps with rows and without, by turns, of many sizes."""
    model, found = runner.model, []
    seqs = runner.new_sequences(3)
    for number, lengths in enumerate([(30, 1, 3), (1, 2, 1), (2, 17, 1), (5, 5, 5), (1, 1, 2)]):
        tokens = tokens_of(number, *lengths)
        places = list(range(1, sum(lengths), 2)) if number % 2 == 0 else []
        embeds = given(model, tokens, places) if places and with_rows else None
        shown = blank(tokens, places) if with_rows else tokens
        found.append(runner.extend(seqs, shown, embeds=embeds).clone())
    runner.free(seqs)
    return found


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert torch.allclose(own, theirs, rtol=0, atol=5e-5 * theirs.abs().max())


def test_halves_take_rows_of_their_own():
    model = make_hybrid()
    expected = rounds(th.Runner(model, **SIZES, compile=False), with_rows=False)
    runner = th.Runner(model, **SIZES, compile=False, two_batch_overlap="on")
    for with_rows in (True, False):
        assert_alike(rounds(runner, with_rows=with_rows), expected)


def test_steps_with_rows_and_without_are_one_graph():
    """Padded and refreshed as if steps were captured: no row of an earlier step is left over."""
    model = make_hybrid()
    expected = rounds(th.Runner(model, **SIZES, compile=False), with_rows=False)
    runner = th.Runner(model, **SIZES, cuda_graphs="on")
    with run_as_traced():
        for with_rows in (True, False, True):
            assert_alike(rounds(runner, with_rows=with_rows), expected)
    report = runner.report()
    assert sorted(report.graphs) == ["extend"]
    assert (report.compiles, report.graph_breaks) == (1, 0)


def test_a_runner_that_takes_none_has_no_place_for_them():
    """Text costs it nothing: no row, no index, and the graph that it always had."""
    model = make_hybrid()
    plain = th.Runner(model, **{**SIZES, "takes_embeds": None}, compile=False)
    (seq,) = plain.new_sequences(1)
    assert not plain.takes_embeds
    embeds = th.Embeds(rows=torch.zeros(1, WIDTH), places=[0])
    with pytest.raises(th.UnsupportedError, match="embeds need a runner with takes_embeds=True"):
        plain.extend([seq], [[1]], embeds=embeds)
    decoding = th.Runner(model, **SIZES, prefill=False, compile=False)
    seqs = decoding.new_sequences(1)
    with pytest.raises(th.UnsupportedError, match="prefill=False"):
        decoding.extend(seqs, [[1]], embeds=embeds)


@pytest.mark.parametrize(
    ("rows", "places", "message"),
    [
        (torch.zeros(2, WIDTH + 1), [0, 1], r"rows of embeds must be \[2, 32\] in torch.float32"),
        (torch.zeros(3, WIDTH), [0, 1], r"must be \[2, 32\] in .* got \[3, 32\]"),
        (torch.zeros(2, WIDTH).half(), [0, 1], r"got \[2, 32\] in torch.float16 on cpu"),
        (torch.zeros(2, WIDTH, device="meta"), [0, 1], r"got \[2, 32\] in torch.float32 on meta"),
        (torch.zeros(2, WIDTH), [1, 1], r"must ascend within 0 and 4, got \[1, 1\]"),
        (torch.zeros(2, WIDTH), [4, 5], r"must ascend within 0 and 4, got \[4, 5\]"),
        (torch.zeros(2, WIDTH), [-1, 2], r"must ascend within 0 and 4, got \[-1, 2\]"),
    ],
)
def test_rows_that_cannot_be(rows: Tensor, places: list[int], message: str):
    runner = th.Runner(make_hybrid(), **SIZES, compile=False)
    (seq,) = runner.new_sequences(1)
    free = runner.free_pages
    with pytest.raises(ValueError, match=message):
        runner.extend([seq], tokens_of(0, 5), embeds=th.Embeds(rows=rows, places=places))
    assert (runner.length(seq), runner.free_pages) == (0, free)
