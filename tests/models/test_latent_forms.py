"""MLA prefill in all its forms: equal logits, a graph for each form, no recompiles.

Inductor's code of expanded forms is held to transformers' logits in ``test_compiled``, of the
absorbed one to eager steps in ``graphs/test_kv_dtype.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.models.oracle import Oracle, ask, assert_serves, chunked, make_texts, mixed, whole
from tests.tiny_models import make_model
from torch_hybrid.models.adapt import adapt

LENGTHS = (1, 65, 150, 230)
POLICIES = {
    "chunks": th.PrefixPolicy(token_budget=96, absorbed="never"),
    "chunks alone": th.PrefixPolicy(token_budget=96, one_shot=False, absorbed="never"),
    "all forms": th.PrefixPolicy(token_budget=96),
}


@pytest.fixture(scope="module")
def hf_model() -> Any:
    return make_model("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2)


@pytest.fixture(scope="module")
def oracle(hf_model: Any) -> Oracle:
    return ask(hf_model, make_texts(LENGTHS))


@pytest.fixture(scope="module")
def model(hf_model: Any, oracle: Oracle) -> th.HybridModel:
    return adapt(hf_model)


def make_runner(model: th.HybridModel, policy: th.PrefixPolicy, *, compile: bool) -> th.Runner:
    backends = th.Backends(prefix=policy)
    sizes = {"max_seqs": 8, "max_tokens": 512, "kv_tokens": 512}
    return th.Runner(model, **sizes, compile=compile, backends=backends)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [20, 100])
def test_prompts_in_pieces(model: th.HybridModel, oracle: Oracle, policy: str, size: int):
    runner = make_runner(model, POLICIES[policy], compile=False)
    assert_serves(runner, oracle, whole(LENGTHS), chunked(LENGTHS, size))


@pytest.mark.slow
def test_one_graph_for_each_form():
    """Of one layer: how many there are is none of a form's business."""
    shallow = make_model("deepseek_v3", num_hidden_layers=1, first_k_dense_replace=1)
    oracle = ask(shallow, make_texts(LENGTHS))
    torch._dynamo.reset()
    runner = make_runner(adapt(shallow), POLICIES["all forms"], compile=True)
    with run_as_traced():
        runner.warm_up()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for seed in range(4):
                logits = last_of(runner, oracle, seed)
                assert logits < 2e-5 * oracle.scale
    report = runner.report()
    assert list(report.graphs) == [
        "decode",
        "extend, absorbed",
        "extend, one shot",
        "extend, 2 chunks",
        "extend, 8 chunks",
    ]
    assert (report.recompiles, report.graph_breaks) == (0, 0)


def last_of(runner: th.Runner, oracle: Oracle, seed: int) -> float:
    """The largest error of the logits after each piece of a random schedule."""
    seqs = runner.new_sequences(len(LENGTHS))
    done = [0] * len(LENGTHS)
    worst = 0.0
    for step in mixed(LENGTHS, seed):
        pieces = [oracle.texts[row][done[row] : done[row] + n] for row, n in step.items()]
        logits = runner.extend([seqs[row] for row in step], pieces)
        for (row, n), out in zip(step.items(), logits, strict=True):
            done[row] += n
            worst = max(worst, (out - oracle.logits[row][done[row] - 1]).abs().max().item())
    runner.free(seqs)
    return worst
