"""Two replicas of the demo's model under Ray Serve, on this machine."""

import json
import os
import re
import socket
import time
import urllib.request

import pytest

pytest.importorskip("ray.serve", reason="ray is not installed")

import torch_hybrid as th
from tests.http.conftest import RECALL, openai, prompt_of, transformers, wait_for


def open_engine():
    """An engine of the demo's model with a prefix cache; a replica makes it."""
    runner = th.Runner(
        th.from_pretrained(RECALL),
        max_seqs=4,
        max_tokens=64,
        kv_tokens=2048,
        max_snapshots=8,
        compile=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(RECALL)
    return th.Engine(runner, tokenizer, prefix_cache=True, max_waiting=64)


@pytest.fixture(scope="module")
def url():
    import ray
    from ray import serve

    from torch_hybrid.http.ray import application

    environment = {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(
        application(
            open_engine, model="demo", min_replicas=2, max_replicas=2, actor_options={"num_cpus": 1}
        )
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=60)


def test_texts_are_those_of_the_engine(client):
    sampling = {"max_tokens": 12, "temperature": 0.0}
    prompts = [prompt_of(seed) for seed in range(6)]
    outputs = open_engine().generate(prompts, th.Sampling(max_new_tokens=12))
    expected = {output.index: output.text for output in outputs}
    for at, prompt in enumerate(prompts):
        whole = client.completions.create(model="demo", prompt=prompt, **sampling)
        assert whole.choices[0].text == expected[at]
        chunks = client.completions.create(model="demo", prompt=prompt, **sampling, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected[at]


def test_a_conversation_keeps_its_replica(client):
    """Each second turn finds the first one's tokens kept, whichever replica has them."""
    words = transformers.AutoTokenizer.from_pretrained(RECALL)
    for seed in range(10, 18):
        content = words.decode(prompt_of(seed, 20)[1:])
        messages = [{"role": "user", "content": content}]
        options = {"model": "demo", "max_tokens": 4, "temperature": 0.0}
        answer = client.chat.completions.create(messages=messages, **options)
        said = answer.choices[0].message.content
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "get a"},
        ]
        answer = client.chat.completions.create(messages=messages, **options)
        assert answer.usage.prompt_tokens_details.cached_tokens >= 48


def test_both_replicas_serve_and_errors_keep_their_status(client, url):
    seen = set()

    def both():
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            created = re.search(r"^vllm:generation_tokens_created.*", answer.read().decode(), re.M)
            seen.add(created[0])  # when the replica was
            assert answer.headers["x-request-id"]
        return len(seen) == 2

    wait_for(both)
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument"):
        client.completions.create(model="demo", prompt=[5], extra_body={"magic": 1})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=[5])


def test_a_client_that_leaves_frees_its_slot(client, url):
    stream = client.completions.create(
        model="demo", prompt=[5], max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    idle = []

    def are_idle():
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            text = answer.read().decode()
        idle.append('num_requests_running{model_name="demo"} 0.0' in text)
        return len(idle) > 12 and all(idle[-12:])

    begun = time.monotonic()
    wait_for(are_idle)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ({"prompt": "a" * 300}, {"prompt": "a" * 400}, True),
        ({"prompt": [5] * 300}, {"prompt": [5] * 256 + [6]}, True),
        ({"prompt": "a"}, {"prompt": "b"}, False),
        ({"messages": [{"role": "user", "content": "a"}]},) * 2 + (True,),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]},
            False,
        ),
        ({"messages": [5]}, {"messages": [5], "n": 1}, True),
    ],
)
def test_conversations_are_told_by_their_beginnings(first, second, is_same):
    from torch_hybrid.http.ray import conversation_of

    names = [conversation_of(json.dumps(body).encode()) for body in (first, second)]
    assert all(names)
    assert (names[0] == names[1]) == is_same
    for body in (b"{", b"[]", b"{}", b"[" * 10_000, b'{"prompt": ""}'):
        assert conversation_of(body) == ""
