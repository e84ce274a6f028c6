"""Rotary positions on three axes: all different, given to each step by its tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.models.oracle import (
    Oracle,
    ask,
    assert_equal_logits,
    chunked,
    decoded,
    make_texts,
    mixed,
    serve,
    whole,
)
from tests.tiny_models import make_model

LENGTHS = (5, 64, 130)


def make_positions(seed: int = 0) -> list[Tensor]:
    """[3, tokens] for each text: every axis moves on by steps of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 4, (3, n), generator=generator).cumsum(1) for n in LENGTHS]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def served(request: pytest.FixtureRequest) -> tuple[th.Runner, Oracle]:
    hf_model = make_model(request.param, seed=1)
    oracle = ask(hf_model, make_texts(LENGTHS), make_positions())
    model = th.adapt(hf_model)
    return th.Runner(model, max_seqs=3, max_tokens=256, kv_tokens=320, compile=False), oracle


@pytest.mark.parametrize(
    "steps",
    [
        whole(LENGTHS),
        list(chunked(LENGTHS, 33)),
        list(decoded(LENGTHS, 4)),
        list(mixed(LENGTHS, 0)),
    ],
    ids=["whole", "chunked", "decoded", "mixed"],
)
def test_logits(served: tuple[th.Runner, Oracle], steps):
    runner, oracle = served
    assert_equal_logits(serve(runner, oracle.texts, steps, make_positions()), oracle)


def test_every_axis_matters(served: tuple[th.Runner, Oracle]):
    runner, oracle = served
    for axis in range(3):
        positions = make_positions()
        for row in positions:
            row[axis] += 1 + torch.arange(row.shape[1])
        moved = serve(runner, oracle.texts, whole(LENGTHS), positions)
        with pytest.raises(AssertionError, match="of the largest logit"):
            assert_equal_logits(moved, oracle)


def test_default_positions_count_on_along_every_axis(served: tuple[th.Runner, Oracle]):
    runner, oracle = served
    counted = [torch.arange(n).expand(3, n) for n in LENGTHS]
    given = serve(runner, oracle.texts, chunked(LENGTHS, 50), counted)
    default = serve(runner, oracle.texts, chunked(LENGTHS, 50))
    for a, b in zip(given, default, strict=True):
        assert torch.equal(a, b)
