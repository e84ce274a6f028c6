"""What transformers computes, and how a runner is led through the same texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE, as_made, block_gaps, router_gaps
from torch_hybrid.graphs.runner import Runner

PROMPT_LENGTHS = (1, 2, 63, 64, 65, 200)
NUM_DECODED = 32

Step = dict[int, int]  # row of a text -> number of its tokens in this step


@dataclass(frozen=True)
class Oracle:
    """Texts, and the logits [tokens, vocab] of each, from one forward over the whole of it."""

    texts: list[list[int]]
    logits: list[Tensor]

    @property
    def scale(self) -> float:
        """The largest logit."""
        return max(logits.abs().max().item() for logits in self.logits)


def make_texts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def ask(hf_model: Any, texts: list[list[int]], positions: list[Tensor] | None = None) -> Oracle:
    """One forward of transformers for each text, without any cache."""
    hf_model.set_experts_implementation("eager")  # the only one that takes float64
    logits = []
    with router_gaps(hf_model) as gaps, block_gaps(hf_model) as between_blocks:
        for row, text in enumerate(texts):
            options = {} if positions is None else {"position_ids": positions[row][:, None]}
            logits.append(hf_model(torch.tensor([text]), use_cache=False, **options).logits[0])
    as_made(hf_model)
    nearest = min(gaps, default=1.0)
    assert nearest > 3e-5, f"routers have a near tie ({nearest:.1e}): take another seed"
    nearest = min(between_blocks, default=1.0)  # of scores that are sums of some 10 numbers like 1
    assert nearest > 3e-6, f"indexers have a near tie ({nearest:.1e}): take another seed"
    return Oracle(texts, logits)


def serve(
    runner: Runner,
    texts: Sequence[Sequence[int]],
    steps: Iterator[Step] | list[Step],
    positions: list[Tensor] | None = None,
) -> list[Tensor]:
    """The logits of each text's tokens, appended step by step."""
    free = runner.free_slots, runner.free_pages
    seqs = runner.new_sequences(len(texts))
    done = [0] * len(texts)
    parts: list[list[Tensor]] = [[] for _ in texts]
    for step in steps:
        spans = {row: slice(done[row], done[row] + count) for row, count in step.items()}
        axes = positions and torch.cat([positions[row][:, span] for row, span in spans.items()], 1)
        out = runner.extend(
            [seqs[row] for row in step],
            [texts[row][span] for row, span in spans.items()],
            logits="all",
            positions=axes,
        )
        for row, logits in zip(step, out.split(list(step.values())), strict=True):
            parts[row].append(logits.clone())
            done[row] += step[row]
    runner.free(seqs)
    assert (runner.free_slots, runner.free_pages) == free
    return [torch.cat(logits) for logits in parts]


def whole(lengths: Sequence[int]) -> list[Step]:
    """Every text in one step."""
    return [dict(enumerate(lengths))]


def chunked(lengths: Sequence[int], size: int) -> Iterator[Step]:
    """Up to ``size`` tokens of every unfinished text in each step."""
    for start in range(0, max(lengths), size):
        yield {row: min(size, n - start) for row, n in enumerate(lengths) if start < n}


def decoded(lengths: Sequence[int], num_decoded: int) -> Iterator[Step]:
    """All but the last tokens of every text, then one of each at a time."""
    yield {row: n - num_decoded for row, n in enumerate(lengths)}
    for _ in range(num_decoded):
        yield dict.fromkeys(range(len(lengths)), 1)


def mixed(lengths: Sequence[int], seed: int) -> Iterator[Step]:
    """Some of the texts in each step, in any order, by one token or by many."""
    rng = random.Random(seed)
    left = dict(enumerate(lengths))
    while left:
        rows = rng.sample(sorted(left), rng.randint(1, len(left)))
        step = {row: min(left[row], rng.choice([1, 1, 2, 5, 17, 64, 90])) for row in rows}
        yield step
        left = {row: n - step.get(row, 0) for row, n in left.items() if n > step.get(row, 0)}


def assert_equal_logits(actual: list[Tensor], oracle: Oracle) -> None:
    """Within 2e-5 of the largest logit, for all tokens that were served."""
    for row, (ours, theirs) in enumerate(zip(actual, oracle.logits, strict=True)):
        error = (ours - theirs[: len(ours)]).abs().max().item() / oracle.scale
        assert error < 2e-5, f"text {row} of {len(ours)} tokens: {error:.1e} of the largest logit"


def assert_serves(runner: Runner, oracle: Oracle, *ways: Iterator[Step] | list[Step]) -> None:
    """The runner gives the oracle's logits, in whichever of these ways its texts arrive."""
    for steps in ways:
        assert_equal_logits(serve(runner, oracle.texts, steps), oracle)


def assert_rounds_like(
    actual: list[Tensor], oracle: Oracle, exact: Oracle, dtype: torch.dtype
) -> None:
    """The error against ``exact`` is at most twice that of ``oracle``, plus one rounding.

    Root mean squares are compared: a model magnifies the rounding of a few tokens at random.
    """

    def error(logits: list[Tensor]) -> float:
        return (torch.cat(logits).double() - torch.cat(exact.logits)).square().mean().sqrt().item()

    band = torch.finfo(dtype).eps * torch.cat(exact.logits).square().mean().sqrt().item()
    ours, theirs = error(actual), error(oracle.logits)
    assert ours <= 2 * theirs + band, f"error {ours:.2e}, of transformers {theirs:.2e}"
