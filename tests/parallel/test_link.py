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

SECONDS = 0.1
COUNT = 1000


def two_sums() -> tuple[list[float], list[Message]]:
    """Two sums under way at once, and work beside them."""
    group = linked_group()
    group.seconds_per_byte = SECONDS / (4 * COUNT)
    ops = torch.ops._c10d_functional
    x = torch.full((COUNT,), dist.get_rank() + 1.0)
    started = [ops.all_reduce(x * factor, "sum", group.group_name) for factor in (1, 2)]
    time.sleep(SECONDS)
    return [ops.wait_tensor(total)[0].item() for total in started], group.messages


def test_one_message_after_another():
    for totals, messages in results(run_ranks(two_sums, 2)):
        assert totals == [3.0, 6.0]
        first, second = messages
        assert first.num_bytes == 4 * COUNT
        assert first.in_flight == pytest.approx(SECONDS)
        assert second.arrival == pytest.approx(first.arrival + SECONDS)
        assert second.wait_end >= second.arrival
        # The first came beside the work, the second half so: what was waited is what is not hidden.
        waited = (first.waited + second.waited) / (first.in_flight + second.in_flight)
        assert hidden_share(messages) == pytest.approx(1 - waited)
        assert 0.3 < hidden_share(messages) < 0.75


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
