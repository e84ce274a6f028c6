"""Sequences that start from a snapshot are those that ran all of its tokens, bit for bit."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

import torch_hybrid as th
from tests.errors import error_text
from tests.tiny_models import BUILDERS, VOCAB_SIZE, make_model
from torch_hybrid.errors import CapacityError
from torch_hybrid.explain.sections import pools
from torch_hybrid.sampling import Draw

FAMILIES = [
    "qwen3_next_dense",
    "qwen3_5",
    "bailing_hybrid",
    "minimax",
    "falcon_h1",
    "jamba",
    "deepseek_v3",
    "qwen3",
    *sorted({"lara_mini", "inkling2_loop"} & BUILDERS.keys()),
]
SIZES = {"max_seqs": 5, "max_tokens": 96, "kv_tokens": 320, "page_size": 8}


def make_runner(family: str = "qwen3_next_dense", **options: object) -> th.Runner:
    given = {**SIZES, "max_snapshots": 2, "compile": False, **options}
    return th.Runner(th.adapt(make_model(family)), **given)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def assert_all_free(runner: th.Runner) -> None:
    cache = runner.cache
    assert runner.free_slots == SIZES["max_seqs"]
    assert cache.pages.num_free == cache.num_pages
    assert cache.states.num_free == cache.states.capacity


def run(runner: th.Runner, seq: th.Sequence, pieces: list[list[int]]) -> list[torch.Tensor]:
    return [runner.extend([seq], [piece]) for piece in pieces]


def assert_same_bits(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for own, right in zip(got, expected, strict=True):
        assert torch.equal(own, right)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [24, 37], ids=["whole pages", "part of a page"])
def test_a_fork_goes_on_as_the_sequence_did(family: str, length: int):
    runner = make_runner(family)
    prompt, tail = tokens(length), [tokens(21, seed=1), [3], [5], tokens(2, seed=2)]
    (cold,) = runner.new_sequences(1)
    runner.extend([cold], [prompt])
    expected = run(runner, cold, tail)
    (seq,) = runner.new_sequences(1)
    runner.extend([seq], [prompt])
    handle = runner.snapshot(seq)
    assert handle.num_tokens == length
    assert_same_bits(run(runner, seq, tail), expected)  # its own next step reads the snapshot
    runner.free([seq])
    (fork,) = runner.new_sequences(1, start=handle)
    assert runner.length(fork) == length
    assert_same_bits(run(runner, fork, tail), expected)
    runner.free([fork, cold])
    runner.release(handle)
    assert_all_free(runner)


def test_forks_run_beside_each_other():
    runner = make_runner()
    prompt = tokens(37)
    tails = [tokens(n, seed=n) for n in (9, 1, 18)]
    expected = []
    for tail in tails:
        (seq,) = runner.new_sequences(1)
        runner.extend([seq], [prompt])
        expected.append([*run(runner, seq, [tail, [7]])])
        runner.free([seq])
    (seq,) = runner.new_sequences(1)
    runner.extend([seq], [prompt])
    handle = runner.snapshot(seq)
    forks = runner.new_sequences(3, start=handle)
    both = [runner.extend(forks, tails), runner.extend(forks, [[7]] * 3)]
    for row, right in enumerate(expected):
        for own, each in zip(both, right, strict=True):
            torch.testing.assert_close(own[row : row + 1], each)


def test_nothing_of_a_snapshot_is_written():
    """Its sequence goes on in the page that it filled in part, forks in pages of their own."""
    runner = make_runner("falcon_h1")
    (seq,) = runner.new_sequences(1)
    runner.extend([seq], [tokens(37)])
    slot = runner.cache.slot(seq)
    pages = runner.cache.make_batch([seq], [[]]).page_table[0, :5].tolist()
    handle = runner.snapshot(seq)

    def kept() -> list[torch.Tensor]:
        found = []
        for pool in runner.cache.pool_tensors():
            if pool.shape[0] == SIZES["max_seqs"] + 2 + 1:
                found.append(pool[slot].clone())
            else:
                found.append(pool[:, pages].flatten(1, 2)[:, :37].clone())
        return found

    before = kept()
    forks = runner.new_sequences(2, start=handle)
    runner.extend([seq, *forks], [tokens(5), tokens(30, seed=1), [9]])
    runner.extend([*forks, seq], [[1], [2], [3]])
    assert_same_bits(kept(), before)
    assert len(set(runner.cache.make_batch(forks, [[], []]).page_table[:, 4].tolist())) == 2


def test_a_launched_sequence_keeps_its_token_when_it_leaves_its_states():
    runner = make_runner()
    greedy = Draw(th.Sampling(temperature=0.0))
    (a, b) = runner.new_sequences(2)
    drawn = []
    for seq in (a, b):
        first = runner.launch([seq], [tokens(20)], [greedy])
        if seq is b:
            runner.snapshot(b)
        second = runner.launch([seq], [None], [greedy])
        third = runner.launch([seq], [None], [greedy])
        drawn.append([*first.result(), *second.result(), *third.result()])
    assert drawn[0][1:] == drawn[1][1:]


def test_models_without_states_start_anywhere_and_need_no_slots():
    runner = make_runner("qwen3", max_snapshots=0)
    prompt = tokens(37)
    (seq,) = runner.new_sequences(1)
    runner.extend([seq], [prompt[:30]])
    expected = runner.extend([seq], [prompt[30:]])
    handles = [runner.snapshot(seq) for _ in range(3)]
    (fork,) = runner.new_sequences(1, start=handles[0], length=30)
    assert torch.equal(runner.extend([fork], [prompt[30:]]), expected)
    for handle in handles:
        runner.release(handle)
    runner.free([seq, fork])
    assert_all_free(runner)


def test_in_halves():
    """The second half of a cut sequence starts where the first left its state."""
    runner = make_runner(two_batch_overlap="on")
    plain = make_runner()
    outs = []
    for each in (runner, plain):
        (seq,) = each.new_sequences(1)
        each.extend([seq], [tokens(37)])
        forks = each.new_sequences(2, start=each.snapshot(seq))
        outs.append([each.extend(forks, [tokens(80, seed=3), [4]]), each.extend(forks, [[1], [2]])])
    for own, right in zip(*outs, strict=True):
        torch.testing.assert_close(own, right, atol=1e-4, rtol=1e-4)


def test_errors():
    runner = make_runner()
    seq, empty = runner.new_sequences(2)
    runner.extend([seq], [tokens(12)])
    assert_expected_inline(
        error_text(ValueError, runner.snapshot, empty),
        """Sequence(id=2) holds no token, and a snapshot must have at least 1""",
    )
    handle = runner.snapshot(seq)
    runner.extend([seq], [[1]])
    runner.snapshot(seq)
    runner.extend([seq], [[1]])
    assert runner.free_snapshots == 0
    assert_expected_inline(
        error_text(CapacityError, runner.snapshot, seq),
        """asked for a snapshot, 0 of 2 are free: release some or raise max_snapshots""",
    )
    assert_expected_inline(
        error_text(ValueError, make_runner().new_sequences, 1, start=handle),
        """Snapshot(id=3, num_tokens=12) belongs to another runner""",
    )
    assert_expected_inline(
        error_text(ValueError, runner.new_sequences, 1, start=handle, length=8),
        """a model with states starts at all 12 tokens, got 8""",
    )
    assert_expected_inline(
        error_text(ValueError, runner.new_sequences, 1, start=handle, length=13),
        """length must be within 1 and 12, got 13""",
    )
    assert_expected_inline(
        error_text(ValueError, runner.new_sequences, 1, length=13),
        """length is of the tokens of a snapshot, got 13 and no start""",
    )
    assert_expected_inline(
        error_text(CapacityError, runner.new_sequences, 4, start=handle),
        """asked for 4 sequence slot(s), 3 of 5 are free: free sequences or raise max_seqs""",
    )
    runner.release(handle)
    for call in (runner.release, lambda it: runner.new_sequences(1, start=it)):
        assert_expected_inline(
            error_text(ValueError, call, handle),
            """Snapshot(id=3, num_tokens=12) was released""",
        )
    assert_expected_inline(
        error_text(CapacityError, make_none, seq),
        """asked for a snapshot, 0 of 0 are free: release some or raise max_snapshots""",
    )
    assert_expected_inline(
        error_text(ValueError, make_runner, max_snapshots=-1),
        """max_snapshots must not be negative, got -1""",
    )


def make_none(_: object) -> None:
    runner = make_runner(max_snapshots=0)
    (seq,) = runner.new_sequences(1)
    runner.extend([seq], [[1, 2]])
    runner.snapshot(seq)


def test_explain_counts_snapshots():
    rows = {row[0]: row for row in pools(make_runner()).rows}
    assert rows["snapshot"][2] == "2"
    assert "snapshot" not in {row[0] for row in pools(make_runner(max_snapshots=0)).rows}
