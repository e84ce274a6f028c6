"""Ranks that do not do the same are told so, by name and within a time; so are those left alone."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

import torch_hybrid as th
from tests.errors import error_text
from tests.parallel.jobs import SIZES, make
from tests.parallel.processes import results, run_ranks

TIME_S = 3.0  # that ranks wait for one another here
BOUND_S = 20.0  # in which a test must be told, on a busy machine


def serve_checked(prompts: list[list[int]]) -> str | None:
    """One step with this rank's prompt; what was raised, and that the runner goes on after it."""
    agreement = th.Agreement(timeout_s=TIME_S)
    model = th.shard(make("qwen3_next_dense"))
    runner = th.Runner(model, **SIZES, compile=False, check_batch=agreement.check)
    seqs = runner.new_sequences(1)
    try:
        runner.extend(seqs, [prompts[dist.get_rank()]])
    except RuntimeError as error:
        runner.extend(seqs, [[1, 2]])
        return str(error)
    return None


def test_ranks_that_agree():
    assert results(run_ranks(serve_checked, 2, [[1, 2, 3]] * 2)) == [None, None]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2, 3], [1, 2, 4]], "tokens of rank 1 differ from those of rank 0"),
        (
            [[1, 2, 3], [1, 2]],
            "tokens, positions, slot_mapping, cu_seqlens, seq_lens of rank 1 differ",
        ),
        ([[1], [1], [2], [3]], "tokens of ranks 2, 3 differ from those of rank 0"),
    ],
)
def test_ranks_that_disagree(prompts: list[list[int]], message: str):
    for text in results(run_ranks(serve_checked, len(prompts), prompts)):
        assert f"the ranks must run the same batch: {message}" in text


def serve_idle_or_not() -> str:
    agreement = th.Agreement(timeout_s=TIME_S)
    model = th.shard(make("qwen3_next_dense"))
    runner = th.Runner(model, **SIZES, compile=False, check_batch=agreement.check)
    seqs = runner.new_sequences(1)
    busy = dist.get_rank() == 1
    return error_text(RuntimeError, runner.extend, seqs if busy else [], [[5]] if busy else [])


def test_a_rank_without_work_beside_one_with():
    for text in results(run_ranks(serve_idle_or_not, 2)):
        assert "tokens" in text
        assert "state_indices" in text


def step_of_some(ranks: list[int], checked: bool, leave: str) -> tuple[str, float]:
    """Steps that the other ranks do not take: they are busy elsewhere, or die.

    Returns what was raised, and how long it took.
    """
    agreement = th.Agreement(timeout_s=TIME_S)
    model = th.shard(make("qwen3_next_dense"))
    check = agreement.check if checked else None
    runner = th.Runner(model, **SIZES, compile=False, check_batch=check)
    seqs = runner.new_sequences(1)
    runner.extend(seqs, [[1, 2, 3]])
    start = time.monotonic()
    if dist.get_rank() not in ranks:
        if leave == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    with pytest.raises(RuntimeError) as raised:
        decode(runner, seqs)
    return str(raised.value), time.monotonic() - start


def decode(runner: th.Runner, seqs: list[th.Sequence]) -> None:
    for token in range(100):
        runner.extend(seqs, [[token]])


def test_a_rank_that_dies():
    """Between steps, without a check: the collective fails on the others."""
    ended = run_ranks(step_of_some, 4, [0, 1, 2], False, "dies", timeout_s=TIME_S)
    assert ended[3].error == "died"
    assert all(seconds < BOUND_S for _, seconds in results(ended[:3]))


def test_a_rank_that_hangs():
    """The group's own timeout ends the wait."""
    ended = run_ranks(step_of_some, 2, [0], False, "hangs", timeout_s=TIME_S, left_out=[1])
    [(message, seconds)] = results(ended[:1])
    assert "Timed out" in message
    assert TIME_S <= seconds < BOUND_S


def test_a_rank_that_does_not_come_is_named():
    ended = run_ranks(step_of_some, 2, [0], True, "hangs", left_out=[1])
    [(message, seconds)] = results(ended[:1])
    assert "1 failed to pass monitoredBarrier" in message
    assert TIME_S <= seconds < BOUND_S


def test_refuses_a_time_of_nothing():
    with pytest.raises(ValueError, match=r"timeout_s must be positive, got 0"):
        th.Agreement(timeout_s=0)
