"""Sums over ranks that are one call in steps of few rows; a CPU leaves them to its collective."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch.library import opcheck

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.models.oracle import make_texts, serve
from tests.parallel.jobs import LENGTHS, ONE_LAYER, SIZES, STEPS, make
from tests.parallel.processes import results, run_ranks
from torch_hybrid.graphs.options import assembly
from torch_hybrid.graphs.passes.short_sums import can_sum_at_once

sum_at_once = torch.ops.torch_hybrid.sum_at_once.default


def graphs_with_collectives(two_batch_overlap: str) -> set[str]:
    """Serve texts with calls and without: both have the same bits, and without all have some."""
    logits, left = [], set()
    for is_short in (False, True):
        model = th.shard(make("qwen3_next_dense", **ONE_LAYER))
        can_sum = mock.patch.object(assembly, "can_sum_at_once", return_value=is_short)
        with can_sum, run_as_traced():
            runner = th.Runner(model, **SIZES, two_batch_overlap=two_batch_overlap)
            logits.append(torch.cat(serve(runner, make_texts(LENGTHS), STEPS)))
        graphs = runner.report().graphs
        left = {name for name in graphs if any("all_reduce" in op for op in graphs[name].ops)}
        assert is_short or left == set(graphs)
    assert torch.equal(*logits)
    return left


def of_whole_steps_and_halves() -> list[set[str]]:
    part = torch.randn(3, 8)
    assert set(opcheck(sum_at_once, (part, dist.group.WORLD.group_name)).values()) == {"SUCCESS"}
    return [graphs_with_collectives(overlap) for overlap in ("off", "on")]


def test_steps_of_few_rows_call_it_but_halves_and_prompts_do_not():
    for whole, halves in results(run_ranks(of_whole_steps_and_halves, 2, limit_s=300)):
        assert whole == {"extend"}
        assert halves == {"extend, in halves", "decode, in halves"}


def test_one_process_and_a_cpu_have_none():
    assert not can_sum_at_once(None, torch.device("cuda", 0))
    assert not can_sum_at_once(mock.Mock(size=2), torch.device("cpu"))
    assert not can_sum_at_once(mock.Mock(size=1), torch.device("cuda", 0))
