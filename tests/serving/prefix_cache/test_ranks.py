"""Ranks that share a model keep the same prefixes, and give up the same."""

from __future__ import annotations

import random

import torch_hybrid as th
from tests.parallel.jobs import make
from tests.parallel.processes import results, run_ranks
from tests.tiny_models import VOCAB_SIZE

SIZES = {"max_seqs": 3, "max_tokens": 128, "kv_tokens": 400, "max_snapshots": 3}


def serve(prompts: list[list[int]]) -> tuple[list[list[int]], list[int], th.PrefixStats]:
    """Serve in three waves; a rank whose batch differs from the others' raises."""
    model = th.shard(make("qwen3_next_dense"))
    check = th.Agreement(timeout_s=20.0).check
    runner = th.Runner(model, **SIZES, compile=False, check_batch=check)
    outputs = []
    with th.Engine(runner, prefix_cache=th.PrefixCache(min_tokens=8)) as engine:
        for first in range(0, len(prompts), 3):
            wave = engine.generate(prompts[first : first + 3], th.Sampling(max_new_tokens=5))
            outputs += sorted(wave, key=lambda output: output.index)
        stats = engine.stats().prefix_cache
    tokens, kept = zip(*[(x.tokens, x.num_cached_tokens) for x in outputs], strict=True)
    return list(tokens), list(kept), stats


def test_ranks_hit_alike():
    draw = random.Random(0)
    begin = [draw.randrange(VOCAB_SIZE) for _ in range(90)]
    ends = [[draw.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(9)]
    prompts = [begin[: draw.choice([30, 60, 90])] + end for end in ends]
    first, second = results(run_ranks(serve, 2, prompts))
    assert first == second
    assert first[2].num_hits > 2
    assert first[2].num_evictions > 0
