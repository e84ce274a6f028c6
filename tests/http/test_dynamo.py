"""The demo's model as a worker of Dynamo: its interface, without a frontend and its services."""

import asyncio
import re

import pytest

pytest.importorskip("dynamo.common.backend", reason="ai-dynamo is not installed")

from dynamo._core import Context
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

import torch_hybrid as th
from tests.http.conftest import RECALL, prompt_of
from tests.serving.fake_runner import FakeRunner
from tests.tiny_tokenizers import byte_level
from torch_hybrid.http.dynamo import Backend

OPTIONS = [str(RECALL), "--eager", "--max-seqs", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def backend():
    """A worker, and a loop that it runs in."""
    loop = asyncio.new_event_loop()
    given = [*OPTIONS, "--served-model-name", "demo", "--namespace", "ours"]
    made, config = loop.run_until_complete(Backend.from_args(given))
    assert (config.model_name, config.served_model_name) == (str(RECALL), "demo")
    assert (config.namespace, config.endpoint) == ("ours", "generate")
    config = loop.run_until_complete(made.start(1))
    assert (config.model, config.served_model_name) == (str(RECALL), "demo")
    assert config.llm.context_length == config.llm.total_kv_blocks * config.llm.kv_cache_block_size
    assert config.llm.max_num_seqs == 4
    yield made, loop
    for _ in range(2):  # the second does nothing
        loop.run_until_complete(made.cleanup())
    loop.close()


def ask(backend, tokens, **options):
    """Chunks of a request."""
    worker, loop = backend

    async def collect():
        request = {"token_ids": tokens, **options}
        return [chunk async for chunk in worker.generate(request, Context())]

    return loop.run_until_complete(collect())


def test_tokens_are_those_of_the_engine(backend, make_engine):
    prompt = prompt_of(3)
    (expected,) = make_engine().generate(prompt, th.Sampling(max_new_tokens=9, logprobs=2))
    chunks = ask(
        backend,
        prompt,
        sampling_options={"temperature": 0.0, "n": 1, "best_of": 1, "guided_decoding": None},
        stop_conditions={"max_tokens": 9, "stop": ["w"], "stop_token_ids_hidden": []},
        output_options={"logprobs": 2},
    )
    assert [token for chunk in chunks for token in chunk["token_ids"]] == expected.tokens
    logprobs = [logprob for chunk in chunks for logprob in chunk["log_probs"]]
    assert logprobs == pytest.approx([entry.logprob for entry in expected.logprobs])
    tops = [top for chunk in chunks for top in chunk["top_logprobs"]]
    assert [len(top) for top in tops] == [2] * 9
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"]["total_tokens"] == len(prompt) + 9
    assert not any("finish_reason" in chunk for chunk in chunks[:-1])


def test_many_at_once_and_several_choices(backend):
    worker, loop = backend

    async def collect(seed):
        options = {"sampling_options": {"temperature": 1.0, "seed": seed, "n": 2}}
        request = {"token_ids": prompt_of(seed), "stop_conditions": {"max_tokens": 6}, **options}
        chunks = [chunk async for chunk in worker.generate(request, Context())]
        return [
            [token for chunk in chunks if chunk["index"] == n for token in chunk["token_ids"]]
            for n in range(2)
        ]

    async def both():
        return await asyncio.gather(*map(collect, range(6)))

    several = loop.run_until_complete(both())
    assert {len(tokens) for pair in several for tokens in pair} == {6}
    assert several == loop.run_until_complete(both())


def test_grammars_bind_the_output():
    pytest.importorskip("llguidance")
    tokenizer = byte_level()
    runner = FakeRunner(max_seqs=2, max_tokens=64, num_pages=64, vocab_size=320)
    worker = Backend(lambda: th.Engine(runner, tokenizer, eos_token_ids=[0]), "fake", None)
    request = {"token_ids": [5], "sampling_options": {"guided_decoding": {"regex": "[ab]{3}c"}}}

    async def ask():
        await worker.start(1)
        chunks = [chunk async for chunk in worker.generate(request, Context())]
        await worker.cleanup()
        return chunks

    chunks = asyncio.run(ask())
    text = tokenizer.decode([token for chunk in chunks for token in chunk["token_ids"]])
    assert re.fullmatch("[ab]{3}c(<end>)?", text)
    assert chunks[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sampling_options": {"magic": 1}}, "magic"),
        ({"sampling_options": {"temperature": -1.0}}, "temperature must be"),
        ({"sampling_options": {"guided_decoding": {}}}, "one grammar, got 0"),
        ({"token_ids": [5] * 100_000}, "100000"),
        ({"token_ids": [500]}, "500"),
    ],
)
def test_what_is_refused_is_the_clients_mistake(backend, options, told):
    tokens = options.pop("token_ids", [5])
    with pytest.raises(InvalidArgument, match=told):
        ask(backend, tokens, **options)


def test_a_request_that_is_aborted_frees_its_slot(backend):
    worker, loop = backend

    async def leave():
        context, told = Context(), 0
        conditions = {"max_tokens": 5000, "ignore_eos": True}
        request = {"token_ids": [5], "stop_conditions": conditions}
        async for chunk in worker.generate(request, context):
            told += len(chunk["token_ids"])
            if not context.is_stopped():
                context.stop_generating()
                await worker.abort(context)
        return told

    assert loop.run_until_complete(leave()) < 5000

    async def is_idle():
        engine = worker._stepper.engine
        while engine.stats().num_running:
            await asyncio.sleep(0.01)

    loop.run_until_complete(asyncio.wait_for(is_idle(), 30))


def test_a_model_that_cannot_be_loaded_ends_the_worker(tmp_path):
    async def start():
        made, _ = await Backend.from_args([str(tmp_path), "--eager"])
        try:
            await made.start(1)
        finally:
            await made.cleanup()

    with pytest.raises(EngineShutdown, match=str(tmp_path)):
        asyncio.run(start())
