"""The engine over a real model: tokens of full forwards, failures inside the model, and Ctrl-C."""

import pytest
import torch

import torch_hybrid as th
from tests.tiny_models import VOCAB_SIZE, make_model
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine

SMALL = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": 192, "page_size": 8, "compile": False}
KINDS = ["linear_attention", "full_attention"]
NEW = 8


def two_layers():
    return make_model("qwen3_next", num_hidden_layers=2, hidden_size=32, layer_types=KINDS)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 70, 2, 33, 64, 150)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def expected(prompts):
    """Greedy tokens by one full forward for each token, without any cache."""
    model = two_layers()
    outputs = []
    for prompt in prompts:
        history = list(prompt)
        for _ in range(NEW):
            logits = model(torch.tensor([history]), use_cache=False).logits
            history.append(int(logits[0, -1].argmax()))
        outputs.append(history[len(prompt) :])
    return outputs


@pytest.fixture
def runner():
    return th.Runner(th.adapt(two_layers()), **SMALL)


def assert_all_returned(runner):
    assert runner.free_slots == SMALL["max_seqs"]
    assert runner.free_pages == SMALL["kv_tokens"] // SMALL["page_size"]


def run_all(engine):
    while engine.has_unfinished:
        engine.step()


def test_serves_what_full_forwards_give(runner, prompts, expected):
    """With pools so small that prompts wait, are cut into chunks, and are preempted."""
    outputs = list(Engine(runner).generate(prompts, Sampling(max_new_tokens=NEW)))
    assert sorted(output.index for output in outputs) == list(range(len(prompts)))
    for output in outputs:
        assert output.tokens == expected[output.index]
    assert_all_returned(runner)


def test_nan_inside_the_model_ends_the_requests_that_meet_it(runner, prompts, expected):
    unused = next(
        token
        for token in range(VOCAB_SIZE)
        if all(token not in [*p, *e] for p, e in zip(prompts[:4], expected, strict=False))
    )
    with torch.no_grad():
        runner.model.hf_model.model.embed_tokens.weight[unused] = float("nan")
    outputs = list(
        Engine(runner).generate([*prompts[:4], [3, unused]], Sampling(max_new_tokens=NEW))
    )
    reasons = {output.index: output.finish_reason for output in outputs}
    assert reasons == {0: "length", 1: "length", 2: "length", 3: "length", 4: "error"}
    for output in outputs:
        if output.index < 4:
            assert output.tokens == expected[output.index]
        else:
            assert "after 2 tokens have NaN or infinite values" in output.error
    # The slot that held NaN is handed out again.
    outputs = list(Engine(runner).generate(prompts[:4], Sampling(max_new_tokens=NEW)))
    assert all(output.tokens == expected[output.index] for output in outputs)
    assert_all_returned(runner)


@pytest.mark.parametrize("num_calls", [1, 3, 9])
def test_ctrl_c_inside_the_model_loses_nothing(runner, prompts, expected, num_calls):
    calls = 0

    def interrupt(*_):
        nonlocal calls
        calls += 1
        if calls == num_calls:
            raise KeyboardInterrupt

    handle = runner.model.hf_model.model.layers[1].register_forward_pre_hook(interrupt)
    engine = Engine(runner)
    requests = [engine.submit(prompt, Sampling(max_new_tokens=NEW)) for prompt in prompts]
    with pytest.raises(KeyboardInterrupt):
        run_all(engine)
    assert_all_returned(runner)
    handle.remove()
    run_all(engine)
    assert [request.output.tokens for request in requests] == expected
    assert_all_returned(runner)


def test_penalties_and_minimum_are_those_of_generate(runner, prompts):
    model = two_layers()
    eos = model.generation_config.eos_token_id = 7
    engine = Engine(runner, eos_token_ids=[eos])
    sampling = Sampling(max_new_tokens=NEW, min_new_tokens=5, repetition_penalty=1.4)
    for output in engine.generate(prompts[:4], sampling):
        tokens = model.generate(
            torch.tensor([output.prompt]),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=5,
            repetition_penalty=1.4,
            pad_token_id=0,
        )
        assert output.tokens == tokens[0, len(output.prompt) :].tolist()


def test_of_reads_the_models_generation_config(runner):
    config = runner.model.hf_model.generation_config
    config.do_sample, config.top_p = True, 0.9
    assert Sampling.of(runner.model) == Sampling(temperature=1.0, top_k=50, top_p=0.9)
