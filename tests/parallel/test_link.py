"""A link of a chosen speed: messages arrive when it has carried them, and nothing else changes."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import torch_hybrid as th
from examples.slow_link import Message, hidden_share, linked_group
from tests.parallel.jobs import SIZES, make
from tests.parallel.processes import results, run_ranks
from torch_hybrid.graphs.options.measure_overlap import Trial, Work, try_halves
from torch_hybrid.graphs.report import Report

SECONDS = 0.1
COUNT = 1000


def two_sums() -> tuple[list[float], list[Message], float]:
    """Two sums under way at once, work beside them, and how long that took."""
    group = linked_group()
    group.seconds_per_byte = SECONDS / (4 * COUNT)
    ops = torch.ops._c10d_functional
    x = torch.full((COUNT,), dist.get_rank() + 1.0)
    begin = time.perf_counter()
    started = [ops.all_reduce(x * factor, "sum", group.group_name) for factor in (1, 2)]
    time.sleep(SECONDS)
    beside = time.perf_counter() - begin
    return [ops.wait_tensor(total)[0].item() for total in started], group.messages, beside


def test_one_message_after_another():
    for totals, messages, beside in results(run_ranks(two_sums, 2)):
        assert totals == [3.0, 6.0]
        first, second = messages
        assert first.num_bytes == 4 * COUNT
        assert first.in_flight == pytest.approx(SECONDS)
        assert second.arrival == pytest.approx(first.arrival + SECONDS)
        assert second.wait_end >= second.arrival
        # The first came beside the work, the second half so: what was waited is what is not hidden.
        waited = (first.waited + second.waited) / (first.in_flight + second.in_flight)
        assert hidden_share(messages) == pytest.approx(1 - waited)
        # On a busy machine it is more: work, and getting from one wait to the next, take longer.
        between = second.wait_start - first.wait_end
        assert 0.3 < hidden_share(messages) <= (beside + between + SECONDS) / (3 * SECONDS) + 0.05


def same_bits(experts: str) -> tuple[bool, set[str]]:
    """The same step over gloo and over a link."""
    logits = []
    for group in (None, linked := linked_group()):
        model = th.shard(make("qwen3_next"), group, experts=experts)
        runner = th.Runner(model, **SIZES, compile=False)
        logits.append(runner.extend(runner.new_sequences(2), [[1, 2, 3], [4]]).clone())
    return torch.equal(*logits), {message.name for message in linked.messages}


@pytest.mark.parametrize(
    ("experts", "names"),
    [("tensor", {"all_reduce"}), ("all_to_all", {"all_reduce", "all_to_all"})],
)
def test_a_shared_model_over_a_link(experts: str, names: set[str]):
    assert results(run_ranks(same_bits, 2, experts)) == [(True, names)] * 2


def auto_overlap() -> tuple[Trial, Work, Report]:
    """A step over a link as slow as its compute, a model's own work, and a runner's trials."""
    torch.set_num_threads(1)
    group = linked_group()
    model = th.shard(make("qwen3"), group)
    sizes = {"max_tokens": 256, "dtype": torch.float32, "device": torch.device("cpu")}
    heavy = Work(flops=4e6, elements=256)  # a GFLOP for 256 tokens
    [fast] = try_halves(heavy, model.ranks, **sizes)
    group.seconds_per_byte = (
        fast.whole / 3 / (256 * 64 * 4)
    )  # a message as long as what is beside it
    for _ in range(5):  # others that compute meanwhile make halves look dear, on all ranks alike
        [slow] = try_halves(heavy, model.ranks, **sizes)
        if slow.pays:
            break
    assert try_halves(heavy, model.ranks, **{**sizes, "max_tokens": 255}) == ()
    group.seconds_per_byte = 0.0
    eager = th.Runner(model, max_seqs=1, max_tokens=64, kv_tokens=64, compile=False)
    work = Work.of(lambda: eager.extend(eager.new_sequences(1), [[1] * 64]), 64)
    auto = th.Runner(
        model, max_seqs=2, max_tokens=256, kv_tokens=256, compile=False, two_batch_overlap="auto"
    )
    return slow, work, auto.report()


def test_auto_overlap_knows_its_link():
    mine, other = results(run_ranks(auto_overlap, 2))
    slow, work, report = mine
    assert slow.pays
    assert slow == other[0]  # ranks must cut alike
    assert report.overlap == other[2].overlap
    assert [trial.num_tokens for trial in report.overlap_trials] == [256]
    model = make("qwen3")
    dim, vocab = model.hf_model.config.hidden_size, model.vocab_size
    assert work.elements == dim
    weights = sum(weight.numel() for weight in model.layers.parameters() if weight.ndim == 2)
    [*specs] = [entry.spec for entries in model.table.layers for entry in entries]
    attention = sum(4 * 64 * spec.num_q_heads * spec.head_dim for spec in specs)  # to 64 keys
    rows = 2  # of logits: that of the last token, and padding
    of_a_rank = (2 * weights + attention) / 2 + rows * dim * vocab / 64
    assert work.flops == of_a_rank / (1 + 2 * len(specs))  # after the embedding too
