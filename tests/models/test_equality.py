"""Every family against transformers' own forward, however its tokens arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.models.oracle import (
    NUM_DECODED,
    PROMPT_LENGTHS,
    Oracle,
    ask,
    assert_rounds_like,
    assert_serves,
    chunked,
    decoded,
    make_texts,
    mixed,
    serve,
    whole,
)
from tests.tiny_models import BUILDERS, in_double, make_model

LENGTHS = [n + NUM_DECODED for n in PROMPT_LENGTHS]
# Weights without a near tie of routers (``ask`` checks) and without a token whose logits magnify
# rounding a hundredfold.
SEEDS = {
    **dict.fromkeys(BUILDERS, 0),
    "qwen3_next": 2,
    "qwen3_5": 1,
    "qwen3_5_moe": 2,
    "lara_mini": 1,
    "inkling2_loop": 3,
    "qwen4_exp": 7,
    "glm5_next": 0,
    "deepseek_v3": 0,
    "kimi_linear": 3,
    "kimi_k3": 1,
    "minimax": 2,
    "granitemoehybrid": 1,
    "zamba2": 2,
    "xlstm": 3,
}


@pytest.fixture(scope="module", params=BUILDERS)
def hf_model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param, seed=SEEDS[request.param])


@pytest.fixture(scope="module")
def oracle(hf_model: Any) -> Oracle:
    return ask(hf_model, make_texts(LENGTHS))


@pytest.fixture(scope="module")
def runner(hf_model: Any, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> th.Runner:
    """Loaded from disk, as a user would."""
    path = tmp_path_factory.mktemp("checkpoint")
    hf_model.save_pretrained(path)
    model = th.from_pretrained(path)
    return th.Runner(model, max_seqs=8, max_tokens=1024, kv_tokens=1024, compile=False)


def test_whole_prompts(runner: th.Runner, oracle: Oracle):
    assert_serves(runner, oracle, whole(PROMPT_LENGTHS))


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_one_prompt_alone(runner: th.Runner, oracle: Oracle, length: int):
    row = PROMPT_LENGTHS.index(length)
    alone = Oracle([oracle.texts[row]], [oracle.logits[row]])
    assert_serves(runner, alone, whole([length]))


@pytest.mark.parametrize("size", [7, 63, 64, 100])
def test_chunked_prompts(runner: th.Runner, oracle: Oracle, size: int):
    assert_serves(runner, oracle, chunked(PROMPT_LENGTHS, size))


def test_decode_after_prompts(runner: th.Runner, oracle: Oracle):
    assert_serves(runner, oracle, decoded(LENGTHS, NUM_DECODED))


@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches(runner: th.Runner, oracle: Oracle, seed: int):
    assert_serves(runner, oracle, mixed(LENGTHS, seed))


def test_last_logits_are_those_of_the_last_tokens(runner: th.Runner, oracle: Oracle):
    texts = [text[:n] for text, n in zip(oracle.texts, PROMPT_LENGTHS, strict=True)]
    seqs = runner.new_sequences(len(texts))
    last = runner.extend(seqs, texts)
    runner.free(seqs)
    expected = torch.stack([x[n - 1] for x, n in zip(oracle.logits, PROMPT_LENGTHS, strict=True)])
    assert (last - expected).abs().max() < 2e-5 * oracle.scale


def test_error_against_double_precision(hf_model: Any, runner: th.Runner, oracle: Oracle):
    exact = ask(in_double(hf_model), oracle.texts)
    served = serve(runner, oracle.texts, chunked(LENGTHS, 64))
    assert_rounds_like(served, oracle, exact, torch.float32)


@pytest.mark.parametrize("length", [5])
def test_greedy_tokens_are_those_of_generate(hf_model: Any, runner: th.Runner, length: int):
    [prompt] = make_texts([length], seed=length)
    count = 24
    expected = hf_model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, min_new_tokens=count
    )[0, length:]
    [seq] = seqs = runner.new_sequences(1)
    tokens, new = [], prompt
    for _ in range(count):
        new = [int(runner.extend([seq], [new])[0].argmax())]
        tokens += new
    runner.free(seqs)
    assert tokens == expected.tolist()
