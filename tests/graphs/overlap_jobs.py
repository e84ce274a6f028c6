"""What each process of a test runs: a shared model in halves and whole."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.tiny_models import VOCAB_SIZE, make_hybrid

SIZES = {"max_seqs": 4, "max_tokens": 128, "kv_tokens": 256}
STEPS = [[70, 3, 0], [1, 1, 0], [1, 4, 20], [1, 1, 1], [0, 1, 0]]
PREFILLS = [[70, 3, 0], [1, 4, 20], [0, 2, 0]]


@dataclass(frozen=True)
class Served:
    """What one rank saw."""

    error: float  # of overlap against none, of the largest logit
    digest: str  # of the logits
    schedule: str  # of the extend step
    halves_of_collectives: list[int]  # in the order in which the extend step starts them


def serve_all() -> tuple[Served, tuple[int, list[int]]]:
    """Both jobs, in processes that are started once."""
    return serve_shared(), recompiles_and_copies_with_whole_experts()


def serve_shared() -> Served:
    """Serve the same prefills whole, and in halves by the schedule."""
    whole = _serve(_runner(), PREFILLS)
    with run_as_traced():
        runner = _runner(compile=True)
        scheduled = _serve(runner, PREFILLS)
    stages = runner.report().graphs["extend, in halves"].schedule
    starts = [s.half for s in stages for op in s.ops if op == "all_reduce"]
    return Served(
        error=((scheduled - whole).abs().max() / whole.abs().max()).item(),
        digest=hashlib.sha256(scheduled.numpy().tobytes()).hexdigest(),
        schedule="\n".join(str(stage).rstrip() for stage in stages),
        halves_of_collectives=starts,
    )


def recompiles_and_copies_with_whole_experts() -> tuple[int, list[int]]:
    """Of steps in halves, in which a rank has down to one token for the experts: graphs beyond
    one for each variant, and how many layers were copied in each."""
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    with run_as_traced():
        model = make_hybrid("qwen3_next", layer_types=kinds, num_hidden_layers=3)
        runner = th.Runner(th.shard(model, experts="all_to_all"), **SIZES, two_batch_overlap="on")
        logits = _serve(runner)
        report = runner.report()
    whole = _serve(th.Runner(runner.model, **SIZES, compile=False))
    assert (logits - whole).abs().max() / whole.abs().max() < 1e-4
    return report.recompiles, [graph.layers.copied for graph in report.graphs.values()]


def _runner(*, compile: bool = False) -> th.Runner:
    model = th.shard(make_hybrid("qwen3_next_dense"))
    overlap = "on" if compile else "off"
    return th.Runner(model, **SIZES, compile=compile, two_batch_overlap=overlap)


def _serve(runner: th.Runner, steps: list[list[int]] = STEPS) -> Tensor:
    rng = random.Random(0)
    seqs = runner.new_sequences(len(steps[0]))
    outputs = []
    for step in steps:
        rows = [row for row, n in enumerate(step) if n]
        tokens = [[rng.randrange(VOCAB_SIZE) for _ in range(step[row])] for row in rows]
        outputs.append(runner.extend([seqs[row] for row in rows], tokens, logits="all"))
    return torch.cat(outputs)
