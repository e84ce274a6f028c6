"""Two GPUs share a model over NCCL: steps captured with their collectives, whole and in halves."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.graphs.test_batch_invariant import assert_same_bits
from tests.models.oracle import make_texts, serve
from tests.parallel.jobs import LENGTHS, OPTIONS, SEEDS, SIZES, STEPS
from tests.parallel.processes import results, run_ranks
from tests.tiny_models import make_model
from torch_hybrid.models.shard import Experts


@dataclass(frozen=True)
class Shared:
    """What one rank saw of a model that two share."""

    error: float  # against the model alone, of the largest logit
    digest: str  # of the logits
    replays_alike: bool
    num_captured: int
    not_captured: dict[str, tuple[str, ...]]
    counts: tuple[int, int, int]  # recompiles, graph breaks, pool clones


def make(family: str) -> th.HybridModel:
    options = OPTIONS.get(family, {})
    return th.adapt(make_model(family, seed=SEEDS.get(family, 0), **options).cuda())


def logits_of(runner: th.Runner) -> Tensor:
    return torch.cat(serve(runner, make_texts(LENGTHS), STEPS)).cpu()


def share(family: str, experts: Experts) -> dict[str, Shared]:
    """The same texts with a model alone, and with a shared one, without overlap and with it."""
    expected = logits_of(th.Runner(make(family), **SIZES, compile=False))
    shared = {}
    for overlap in ("off", "on"):
        model = th.shard(make(family), experts=experts)
        runner = th.Runner(model, **SIZES, two_batch_overlap=overlap)
        logits, again = logits_of(runner), logits_of(runner)
        report = runner.report()
        shared[overlap] = Shared(
            error=((logits - expected).abs().max() / expected.abs().max()).item(),
            digest=hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
            replays_alike=torch.equal(logits, again),
            num_captured=len(report.captured_graphs),
            not_captured=report.not_captured,
            counts=(report.recompiles, report.graph_breaks, len(report.pool_clones)),
        )
    return shared


def keep_bits(families: list[str]) -> None:
    """Tokens of shared models have the same bits in any batch."""
    sizes = {**SIZES, "kv_tokens": 640, "page_size": 8, "batch_invariant": True}
    for family in families:
        assert_same_bits(th.Runner(th.shard(make(family)), **sizes))


# A rank waits for another that still compiles.
NCCL: dict[str, Any] = {"backend": "nccl", "timeout_s": 300.0}
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices"
)


@pytest.mark.cuda
@needs_two
def test_the_same_bits_in_any_batch():
    families = ["qwen3_next", "kimi_linear", "falcon_h1"]
    results(run_ranks(keep_bits, 2, families, limit_s=600, **NCCL))


@pytest.mark.cuda
@needs_two
@pytest.mark.parametrize(
    ("family", "experts"),
    [("qwen3_next_dense", "tensor"), ("kimi_linear", "tensor"), ("qwen3_next", "all_to_all")],
)
def test_logits_are_those_of_one_process(family: str, experts: Experts):
    ranks = results(run_ranks(share, 2, family, experts, limit_s=400, **NCCL))
    for overlap in ("off", "on"):
        first, second = (rank[overlap] for rank in ranks)
        assert first.error < 2e-5, f"{first.error:.1e} of the largest logit"
        assert first.digest == second.digest, "the ranks differ"
        assert first.replays_alike
        assert first.num_captured, first.not_captured
        assert first.counts == (0, 0, 0)
