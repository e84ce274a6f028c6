"""The thread that steps: leavers free their slots, steps may raise, a signal drains."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

import torch_hybrid as th
from tests.http.conftest import (
    MAX_SEQS,
    RECALL,
    Server,
    openai,
    prompt_of,
    wait_for,
)
from torch_hybrid.http import create_app

LONG = {"model": "demo", "max_tokens": 400, "stream": True}


@pytest.fixture
def own(make_engine):
    """A server that a test may break."""
    started = Server(make_engine(), log_requests=True)
    yield started
    started.close()


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_step(own, streams):
    with own.gate.closed():
        body = {"prompt": [5], "max_tokens": 400, "stream": streams}
        text = json.dumps(body)
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", own.port))
        connection.sendall(f"{head}content-length: {len(text)}\r\n\r\n{text}".encode())
        calls = own.app.state.stepper
        wait_for(lambda: calls.num_open == 1)
    wait_for(lambda: own.gate.num_steps > 3)
    with own.gate.closed():
        free = own.engine.stats().free_slots
        connection.close()
        wait_for(lambda: calls.num_open == 0)
        num_steps = own.gate.num_steps
    wait_for(lambda: own.engine.stats().free_slots == free + 1)
    assert own.gate.num_steps <= num_steps + 2  # the step that was waiting, and its own end


def test_a_step_that_raises_fails_its_requests_and_no_others(own):
    def ask(prompt):
        try:
            answer = own.client.completions.create(model="demo", prompt=prompt, max_tokens=4)
        except openai.InternalServerError as error:
            return error.message
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(MAX_SEQS + 2) as pool:
        with own.gate.closed():
            answers = [pool.submit(ask, [5 + n]) for n in range(MAX_SEQS + 2)]
            wait_for(lambda: own.app.state.stepper.num_open == MAX_SEQS + 2)
            own.gate.raises = [RuntimeError("no kernel")]
        found = [answer.result() for answer in answers]
    (failed,) = {message for message in found if message != 4}
    assert "a step raised RuntimeError" in failed
    assert found.count(failed) <= MAX_SEQS  # those that had a slot; others waited
    assert found.count(4) >= 2
    assert own.engine.stats().free_slots == MAX_SEQS
    assert own.get("/health")[0] == 200


def test_health_fails_while_steps_raise_one_after_the_other(own):
    for _ in range(3):
        own.gate.raises = [RuntimeError("no kernel")]
        with pytest.raises(openai.InternalServerError):
            own.client.completions.create(model="demo", prompt=[5], max_tokens=4)
    assert own.get("/health") == (503, '{"status":"the last 3 steps raised errors"}')
    own.client.completions.create(model="demo", prompt=[5], max_tokens=4)
    assert own.get("/health")[0] == 200


def test_a_fault_in_a_stream_is_told_in_it(own):
    stream = own.client.completions.create(**LONG, prompt=[5])
    next(stream)
    own.gate.raises = [RuntimeError("no kernel")]
    with pytest.raises(openai.APIError, match="a step raised RuntimeError"):
        list(stream)


def test_health_tells_what_keeps_the_server(make_engine):
    may_load = threading.Event()

    def load():
        may_load.wait()
        raise ValueError("no such model")

    app = create_app(load, model="demo")
    with TestClient(app) as client:
        assert client.get("/health").json() == {"status": "loading the model"}
        refused = client.post("/v1/completions", json={"prompt": "w5"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        may_load.set()
        with pytest.raises(ValueError, match="no such model"):
            app.state.ended.result(60)
        assert "no such model" in client.get("/health").json()["status"]


def test_an_adapter_cannot_have_the_name_of_the_model(make_engine, monkeypatch):
    monkeypatch.setattr(th.Engine, "adapters", ("demo",))
    app = create_app(make_engine, model="demo")
    with TestClient(app), pytest.raises(ValueError, match="model and an adapter are both called"):
        app.state.ended.result(60)


def test_drafts_change_no_text_and_are_counted(make_engine):
    plain = make_engine()
    (expected,) = plain.generate([prompt_of(2)], th.Sampling(max_new_tokens=60))
    drafting = Server(make_engine(speculate=th.Speculation("ngram", num_drafts=2, adapts=False)))
    answer = drafting.client.completions.create(model="demo", prompt=prompt_of(2), max_tokens=60)
    assert answer.choices[0].text == expected.text
    num_accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens
    assert num_accepted == drafting.engine.stats().drafts.accepted > 0
    text = drafting.get("/metrics")[1]
    assert f'spec_decode_num_accepted_tokens_total{{model_name="demo"}} {num_accepted}.0' in text
    drafting.close()


def test_metrics_have_the_names_that_dashboards_know(own, caplog):
    own.client.completions.create(model="demo", prompt=[5, 6, 7], max_tokens=4)
    wait_for(lambda: "request_success_total{" in own.get("/metrics")[1])
    lines = dict(line.rsplit(" ", 1) for line in own.get("/metrics")[1].splitlines())
    label = '{model_name="demo"}'
    counts = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "prompt_tokens_total": 3,
        "generation_tokens_total": 4,
        "num_preemptions_total": 0,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 3,
        "e2e_request_latency_seconds_count": 1,
    }
    assert {name: float(lines[f"vllm:{name}{label}"]) for name in counts} == counts
    assert lines['vllm:request_success_total{finished_reason="length",model_name="demo"}'] == "1.0"


def test_a_signal_lets_running_requests_end():
    command = [sys.executable, "-m", "torch_hybrid.cli", "serve", str(RECALL)]
    options = ["--port", "0", "--eager", "--log-requests", "--served-model-name", "demo"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    url = process.stderr.readline().split()[-1]
    wait_for(lambda: is_ready(url))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    stream = client.completions.create(**LONG, prompt=[5])
    next(stream)
    os.kill(process.pid, signal.SIGTERM)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert process.wait(60) == 0
    assert "prompt=1 kept=0 generated=400" in process.stderr.read()


def test_a_model_that_cannot_be_loaded_ends_the_server_in_a_sentence():
    command = [sys.executable, "-m", "torch_hybrid.cli", "serve", "./nowhere", "--port", "0"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[1:] == ["error: there is no folder ./nowhere"]


def is_ready(url):
    try:
        with urllib.request.urlopen(f"{url}/health") as answer:
            return answer.status == 200
    except OSError:
        return False
