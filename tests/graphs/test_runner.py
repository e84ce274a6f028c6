"""The runner's books and its refusals, on a model that runs eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import torch_hybrid as th
from tests.errors import error_text
from tests.tiny_models import VOCAB_SIZE, make_hybrid, make_model
from torch_hybrid.backends import recurrent
from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.step import Step
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.models.adapt import adapt
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE


class InterruptibleModel:
    """A model that raises in the middle of its forward, after it has written states."""

    def __init__(self, model: th.HybridModel) -> None:
        self._model = model
        self.table, self.vocab_size = model.table, model.vocab_size
        self.num_position_axes, self.ranks = model.num_position_axes, model.ranks
        self.eos_token_ids = model.eos_token_ids
        self.dtype, self.device = model.dtype, model.device
        self.logits = model.logits
        self.error: BaseException | None = None

    def __call__(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor:
        hidden = self._model(tokens, positions, step)
        if self.error is not None:
            raise self.error
        return hidden


@pytest.fixture(scope="module")
def model() -> InterruptibleModel:
    return InterruptibleModel(make_hybrid())


@pytest.fixture
def runner(model: InterruptibleModel) -> Runner:
    model.error = None
    return make_runner(model)


def make_runner(model: Any, **options: Any) -> Runner:
    sizes = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": 96, "page_size": 16, "compile": False}
    return Runner(model, **{**sizes, **options})


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def books(runner: Runner, seqs: list[th.Sequence]) -> tuple[object, ...]:
    return runner.free_slots, runner.free_pages, [runner.length(seq) for seq in seqs]


# ---- what extend refuses ---------------------------------------------------------------------

REFUSED = {
    "no sequences": ([], [[1]], {}, "got 1 lists for 0 sequences"),
    "too few lists": ([0, 1], [[1]], {}, "got 1 lists for 2 sequences"),
    "too many lists": ([0], [[1], [2]], {}, "got 2 lists for 1 sequences"),
    "empty prompt": ([0, 1], [[1], []], {}, "at least one new token, got [1, 0]"),
    "token below": ([0], [[5, -1]], {}, "token ids must be within 0 and 198, got -1"),
    "token above": ([0], [[VOCAB_SIZE]], {}, "token ids must be within 0 and 198, got 199"),
    "over max_tokens": (
        [0, 1],
        [[1] * 60, [1] * 5],
        {},
        "at most max_tokens = 64 new tokens fit one step, got 65: extend in chunks",
    ),
    "kind of logits": ([0], [[1]], {"logits": "some"}, "must be 'last' or 'all', got 'some'"),
    "twice": ([0, 0], [[1], [2]], {}, "a sequence is given twice in one call"),
    "positions on too many axes": (
        [0],
        [[1, 2]],
        {"positions": torch.zeros(3, 2, dtype=torch.int64)},
        "positions must be int64 of shape [2], got torch.int64 of shape [3, 2]",
    ),
    "positions too short": (
        [0],
        [[1, 2]],
        {"positions": torch.zeros(1, dtype=torch.int64)},
        "positions must be int64 of shape [2], got torch.int64 of shape [1]",
    ),
    "positions of another dtype": (
        [0],
        [[1, 2]],
        {"positions": torch.zeros(2)},
        "positions must be int64 of shape [2], got torch.float32 of shape [2]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_changes(runner: Runner, case: str):
    rows, new, options, text = REFUSED[case]
    seqs = runner.new_sequences(2)
    runner.extend(seqs, [tokens(20), tokens(3)])
    before, pools = books(runner, seqs), [pool.clone() for pool in runner.cache.pool_tensors()]
    message = error_text(ValueError, runner.extend, [seqs[row] for row in rows], new, **options)
    assert text in message
    assert books(runner, seqs) == before
    for pool, copy in zip(runner.cache.pool_tensors(), pools, strict=True):
        assert torch.equal(pool, copy)


def test_sequences_that_are_not_ours(runner: Runner, model: InterruptibleModel):
    freed, live = runner.new_sequences(2)
    runner.free([freed])
    [foreign] = make_runner(model).new_sequences(1)
    assert_expected_inline(
        error_text(ValueError, runner.extend, [live, freed], [[1], [2]]),
        """Sequence(id=1) was freed""",
    )
    assert_expected_inline(
        error_text(ValueError, runner.extend, [live, foreign], [[1], [2]]),
        """Sequence(id=1) belongs to another runner""",
    )
    assert_expected_inline(
        error_text(ValueError, runner.free, [live, freed]),
        """Sequence(id=1) was freed""",
    )
    assert books(runner, [live]) == (2, 6, [0])


def test_pools_too_small_for_a_prompt(runner: Runner):
    a, b = seqs = runner.new_sequences(2)
    runner.extend([a], [tokens(50)])
    before = books(runner, seqs)
    assert_expected_inline(
        error_text(th.CapacityError, runner.extend, seqs, [[1], tokens(40)]),
        """asked for 3 KV page(s), 2 of 6 are free: free sequences or raise kv_tokens""",
    )
    assert books(runner, seqs) == before
    runner.extend([a, b], [[1], [2]])
    runner.free([a])
    runner.extend([b], [tokens(64)])
    assert runner.length(b) == 65


def test_more_sequences_than_slots(runner: Runner):
    runner.new_sequences(2)
    assert_expected_inline(
        error_text(th.CapacityError, runner.new_sequences, 2),
        """asked for 2 sequence slot(s), 1 of 3 are free: free sequences or raise max_seqs""",
    )
    assert runner.free_slots == 1
    assert error_text(ValueError, runner.new_sequences, -1) == "count must not be negative, got -1"
    assert runner.new_sequences(0) == []


def test_construction(model: InterruptibleModel):
    text = error_text(ValueError, make_runner, model, max_tokens=DEFAULT_CHUNK_SIZE - 1)
    assert text == "max_tokens must hold at least one chunk of 32 tokens, got 31"
    assert_expected_inline(
        error_text(ValueError, make_runner, model, max_seqs=0),
        """max_seqs must allow at least one sequence slot, got 0""",
    )
    assert_expected_inline(
        error_text(ValueError, make_runner, model, two_batch_overlap="sometimes"),
        """two_batch_overlap must be 'off', 'on', 'auto' or an OverlapPolicy, got 'sometimes'""",
    )
    assert_expected_inline(
        error_text(ValueError, make_runner, model, two_batch_overlap="on", max_seqs=1),
        """\
decode steps of at most 1 sequence(s) are too small to cut in halves: two_batch_overlap needs \
max_seqs of at least 2""",
    )
    assert_expected_inline(
        error_text(ValueError, make_runner, model, two_batch_overlap="on", max_tokens=63),
        """\
extend steps of at most 63 tokens are too small to cut in halves: two_batch_overlap needs \
max_tokens of at least 64""",
    )
    text = error_text(ValueError, make_runner, model, backends=th.Backends(full="nonesuch"))
    assert text.startswith("paged_attention has no implementation 'nonesuch'; it has ['auto', ")


# ---- interrupted steps -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom"), MemoryError()])
def test_a_step_cut_off_in_the_middle(
    runner: Runner, model: InterruptibleModel, error: BaseException
):
    undisturbed = make_runner(model)
    [witness], [broken, other] = runner.new_sequences(1), runner.new_sequences(2)
    [twin] = undisturbed.new_sequences(1)
    for r, seq in ((runner, witness), (undisturbed, twin)):
        r.extend([seq], [tokens(9)])
    runner.extend([broken], [tokens(17)])

    model.error = error
    with pytest.raises(type(error)):
        runner.extend([broken, other], [[1, 2], tokens(20)])
    model.error = None

    for seq in (broken, other):
        text = error_text(ValueError, runner.extend, [witness, seq], [[1], [2]])
        assert text == f"{seq} was in a step that did not finish: free it"
    assert runner.length(broken) == 17
    runner.free([broken, other])
    assert (runner.free_slots, runner.free_pages) == (2, 5)
    served = runner.extend([witness], [tokens(4, seed=1)])
    assert torch.equal(served, undisturbed.extend([twin], [tokens(4, seed=1)]))


def test_a_slot_that_was_broken_starts_afresh(runner: Runner, model: InterruptibleModel):
    expected = make_runner(model)
    [seq] = expected.new_sequences(1)
    logits = expected.extend([seq], [tokens(12)])
    for pool in runner.cache.pool_tensors():
        pool.fill_(float("nan"))  # whatever was left there
    [seq] = runner.new_sequences(1)
    assert torch.equal(runner.extend([seq], [tokens(12)]), logits)


def test_full_attention_alone_has_no_chunks_to_hold():
    model = make_hybrid("qwen3")
    whole, runners = (
        make_runner(model),
        [
            make_runner(model, max_tokens=16),
            make_runner(model, max_tokens=16, two_batch_overlap="on"),
            make_runner(model, max_tokens=2, two_batch_overlap="on"),
        ],
    )
    text = tokens(40)
    expected = whole.extend(whole.new_sequences(1), [text], logits="all")
    for runner in runners:
        [seq] = runner.new_sequences(1)
        for start in range(0, 40, runner.max_tokens):
            end = start + runner.max_tokens
            logits = runner.extend([seq], [text[start:end]], logits="all")
            error = (logits - expected[start:end]).abs().max()
            assert error < 2e-5 * expected.abs().max()
    assert error_text(ValueError, make_runner, model, max_tokens=0) == (
        "max_tokens must be at least 1, got 0"
    )


# ---- what extend changes ---------------------------------------------------------------------


def test_slots_and_pages_that_are_not_named_stay_bit_identical(runner: Runner):
    a, b, c = runner.new_sequences(3)
    runner.extend([a, b, c], [tokens(20), tokens(5), tokens(17)])
    states = [t for pools in runner.cache.pools["gated_delta_rule"] for t in pools.values()]
    kv = runner.cache.pools["paged_attention"][0]["kv"]
    before = [t.clone() for t in (*states, kv)]
    pages = runner.cache.make_batch([b], [[1]]).page_table[0].tolist()
    runner.extend([b], [[7]])
    after = [*states, kv]
    slot = runner.cache.slot(b)
    others = [other for other in range(4) if other != slot]
    for old, new in zip(before[:-1], after[:-1], strict=True):
        assert torch.equal(old[others], new[others])
        assert not torch.equal(old[slot], new[slot])
    rest = [page for page in range(7) if page not in pages]
    assert torch.equal(before[-1][:, rest], kv[:, rest])
    assert not kv[:, 0].any(), "the null page was written"
    for state in states:
        assert not state[0].any(), "the null slot was written"


def test_pages_come_as_tokens_do(runner: Runner):
    [seq] = runner.new_sequences(1)
    assert [runner.pages_needed(seq, n) for n in (1, 16, 17, 96)] == [1, 1, 2, 6]
    runner.extend([seq], [tokens(16)])
    assert (runner.free_pages, runner.pages_needed(seq, 1)) == (5, 1)
    runner.extend([seq], [[1]])
    assert (runner.free_pages, runner.length(seq)) == (4, 17)
    runner.free([seq])
    assert (runner.free_slots, runner.free_pages) == (3, 6)
    assert error_text(ValueError, runner.length, seq).endswith("was freed")


def test_the_last_token_of_the_pool_can_be_used(runner: Runner):
    [seq] = runner.new_sequences(1)
    runner.extend([seq], [tokens(64)])
    runner.extend([seq], [tokens(31)])
    runner.extend([seq], [[1]])
    assert runner.length(seq) == runner.max_seq_len == 96
    assert "asked for 1 KV page(s), 0 of 6" in error_text(
        th.CapacityError, runner.extend, [seq], [[1]]
    )


def test_shapes_of_logits(runner: Runner):
    seqs = runner.new_sequences(2)
    assert runner.extend(seqs, [tokens(5), tokens(2)]).shape == (2, VOCAB_SIZE)
    assert runner.extend(seqs, [tokens(5), [1]], logits="all").shape == (6, VOCAB_SIZE)
    assert runner.extend(seqs, [[1], [1]], logits="all").shape == (2, VOCAB_SIZE)


def test_one_slot_and_one_page(model: InterruptibleModel):
    runner = make_runner(model, max_seqs=1, kv_tokens=1, page_size=16)
    [seq] = runner.new_sequences(1)
    runner.extend([seq], [tokens(3)])
    runner.extend([seq], [[1]])
    assert runner.max_seq_len == 16


def test_a_report_of_nothing_compiled(runner: Runner):
    report = runner.report()
    assert (report.compiles, report.recompiles, report.graph_breaks) == (0, 0, 0)
    assert report.pool_bytes == sum(pool.nbytes for pool in runner.cache.pool_tensors())
    assert report.static_input_bytes > 0


@pytest.mark.parametrize("family", ["qwen3_next_dense", "kimi_linear", "bamba", "minimax"])
def test_a_runner_of_decode_steps_alone(family: str):
    """It gives the logits of one that prefills, and makes nothing that prefill needs."""
    model = adapt(make_model(family, seed=4))
    both, decode = (make_runner(model, prefill=prefill) for prefill in (True, False))
    assert decode.variants == ("decode",)
    assert all(list(backend.choices) == [Mode.DECODE] for backend in decode.backends.values())
    [ours], [theirs] = decode.new_sequences(1), both.new_sequences(1)
    for token in tokens(5):
        actual, expected = decode.extend([ours], [[token]]), both.extend([theirs], [[token]])
        assert torch.equal(actual, expected)
    assert_expected_inline(
        error_text(th.UnsupportedError, decode.extend, [ours], [[1, 2]]),
        """a runner with prefill=False appends one token to each sequence, got [2]""",
    )
    assert decode.length(ours) == 5
    assert_expected_inline(
        error_text(th.UnsupportedError, th.Engine, decode),
        """an engine prefills prompts, got a runner with prefill=False""",
    )


def test_a_runner_of_decode_steps_needs_no_implementation_of_prefill(
    monkeypatch: pytest.MonkeyPatch,
):
    select = recurrent.select

    def no_chunks(op: str, known: Mapping[str, Any], *args: Any) -> Any:
        return select(op, {name: i for name, i in known.items() if "chunk" not in name}, *args)

    monkeypatch.setattr(recurrent, "select", no_chunks)
    with pytest.raises(th.UnsupportedError, match="no implementation of gated_delta_rule"):
        make_runner(make_hybrid())
    make_runner(make_hybrid(), prefill=False)
