"""Errors are OpenAI's object with the right status, and 422 is never one."""

import json
import socket

import pytest

from tests.http.conftest import MAX_WAITING, ROOM, Server, openai, wait_for


def refused(answer):
    """Status, parameter and message of an error."""
    status, headers, text = answer
    error = json.loads(text)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert headers["x-request-id"]
    return status, error["param"], error["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ("", None, "the body: Invalid JSON"),
        ("[]", None, "the body: Input should be an object"),
        ('{"prompt": "w5', None, "the body: Invalid JSON"),
        ("[" * 100_00, None, "the body: Invalid JSON: recursion limit"),
        ('{"prompt": "\\ud800"}', None, "the body: Invalid JSON"),
        ("{}", "prompt", "you must provide prompt"),
        ('{"prompt": ""}', "prompt", "prompt must not be empty"),
        ('{"prompt": []}', "prompt", "prompt must not be empty"),
        ('{"prompt": [[]]}', None, "the prompt must have at least 1 token, got 0"),
        ('{"prompt": [5, "w6"]}', "prompt", "got [5, 'w6']"),
        ('{"prompt": [128]}', None, "token ids must be within 0 and 127, got 128"),
        ('{"prompt": [-1]}', None, "token ids must be within 0 and 127, got -1"),
        ('{"prompt": [1e3]}', "prompt", "a text or token ids, or a list of either, got [1000.0]"),
        ('{"prompt": "w5", "magic": 1}', "magic", "Unrecognized request argument supplied: magic"),
        ('{"prompt": "w5", "temperature": NaN}', "temperature", "finite number, got nan"),
        ('{"prompt": "w5", "temperature": -1}', "temperature", "at least 0, got -1"),
        ('{"prompt": "w5", "temperature": "1"}', "temperature", "valid number, got '1'"),
        ('{"prompt": "w5", "top_p": 0}', "top_p", "within (0, 1], got 0"),
        ('{"prompt": "w5", "top_k": -2}', "top_k", "at least 0, got -2"),
        ('{"prompt": "w5", "n": 0}', "n", "greater than or equal to 1, got 0"),
        ('{"prompt": "w5", "n": 7}', "n", f"a call may ask for {MAX_WAITING} outputs, got 7"),
        ('{"prompt": "w5", "max_tokens": 0}', "max_tokens", "at least 1 without echo, got 0"),
        ('{"prompt": "w5", "max_tokens": -1}', "max_tokens", "got -1"),
        ('{"prompt": "w5", "min_tokens": 99}', "min_tokens", "at most max_tokens = 16, got 99"),
        ('{"prompt": "w5", "stop": ""}', "stop", "stop: must be a text of 1 to 256 characters"),
        ('{"prompt": "w5", "stop": [5]}', "stop", "or a list of at most 8, got [5]"),
        ('{"prompt": "w5", "stream_options": {}}', "stream_options", "needs stream: true"),
        ('{"prompt": "w5", "logprobs": 21}', "logprobs", "got 21"),
        ('{"prompt": "w5", "logit_bias": {"500": 1}}', "logit_bias", "within 0 and 127, got 500"),
        ('{"prompt": "w5", "logit_bias": {"x": 1}}', "logit_bias", "valid integer"),
        ('{"prompt": "w5", "seed": 18446744073709551616}', "seed", "64-bit"),
    ],
)
def test_a_wrong_completion_is_400_and_names_the_field(server, body, param, message):
    status, named, told = refused(server.post("/v1/completions", body))
    assert status == 400
    assert message in told
    assert (named or "").partition(".")[0] == (param or "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"messages": []}', "messages: "),
        ('{"messages": [{"role": "user"}]}', 'must have "role" and "content"'),
        ('{"messages": [{"content": "w5"}]}', 'must have "role" and "content"'),
        ('{"messages": ["w5"]}', "should be an object, got 'w5'"),
        ('{"messages": [{"role": "user", "content": 5}]}', "a text or a list of parts"),
        ('{"messages": [{"role": "user", "content": "w5"}], "top_logprobs": 2}', "needs logprobs"),
    ],
)
def test_a_wrong_chat_is_400(server, body, message):
    status, _, told = refused(server.post("/v1/chat/completions", body))
    assert status == 400
    assert message in told


@pytest.mark.parametrize("url", ["https://host/a.png", "/etc/passwd", "file:///etc/passwd", None])
def test_the_server_reads_no_images_by_address(server, url):
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": url, "text": None},
        {"image": url},
    ]
    for part in parts:
        body = json.dumps({"messages": [{"role": "user", "content": [part]}]})
        status, _, told = refused(server.post("/v1/chat/completions", body))
        assert status == 400
        assert "the server reads no files or addresses" in told


def test_a_prompt_that_is_too_long_is_told_its_length(server):
    with pytest.raises(openai.BadRequestError) as refusal:
        server.client.completions.create(model="demo", prompt=[5] * (ROOM + 1), max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"
    assert f"is {ROOM} tokens, and the prompt has {ROOM + 1}" in str(refusal.value)


def test_another_type_than_json_is_400(server):
    answer = server.request("POST", "/v1/completions", '{"prompt": "w5"}')
    assert refused(answer) == (400, None, "Content-Type must be application/json, got ''")


def test_unknown_models_and_routes_are_404(server):
    with pytest.raises(openai.NotFoundError) as refusal:
        server.client.completions.create(model="other", prompt="w5")
    assert refusal.value.code == "model_not_found"
    assert refused(server.request("GET", "/v1/nothing"))[0] == 404
    assert refused(server.request("GET", "/v1/completions"))[0] == 405


def test_a_body_that_is_too_large_is_413_and_the_client_can_read_it(server):
    body = b"x" * 20_000_000  # far more than sockets buffer
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + body)  # a server that closes at once would reset this
        answer = connection.recv(65536).decode()
        while "more came" not in answer and (more := connection.recv(65536)):
            answer += more.decode()
    assert answer.startswith("HTTP/1.1 413 ")
    assert "a body may have 100000 bytes, and more came" in answer
    with pytest.raises(openai.APIStatusError) as refusal:
        server.client.completions.create(model="demo", prompt="w5 " * 100_000)
    assert refusal.value.status_code == 413


def test_a_full_queue_is_429_and_waiting_too_long_503(make_engine):
    server = Server(make_engine(max_waiting=1), max_wait_s=0.3)
    running = server.client.completions.create(
        model="demo", prompt=[5], max_tokens=10**4, stream=True
    )
    others = [
        server.client.completions.create(model="demo", prompt=[n], max_tokens=10**4, stream=True)
        for n in (6, 7, 8)  # all slots are taken now
    ]
    with server.gate.closed():
        body = '{"prompt": [9], "max_tokens": 1}'
        status, headers, text = server.post("/v1/completions", body)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "has waited for 0.3 s" in text
    wait_for(lambda: server.engine.stats().num_waiting == 0)
    with server.gate.closed():
        waiting = server.engine.prepare([9])
        server.engine.enqueue([waiting])  # takes the queue's only place
    status, headers, text = server.post("/v1/completions", body)
    assert (status, headers["retry-after"]) == (429, "1")
    assert "at most max_waiting = 1 may wait" in text
    for stream in (running, *others):
        stream.close()
    server.close()


def test_keys_are_asked_for_except_for_health(make_engine):
    server = Server(make_engine(), api_key="key")
    assert server.client.models.list().data
    for wrong in ("", "ke", "keys"):
        with pytest.raises(openai.AuthenticationError):
            server.client_of(wrong or "x").models.list()
    assert refused(server.request("GET", "/metrics"))[0] == 401
    assert refused(server.post("/v1/completions", "x" * 10_000_000))[0] == 401
    assert server.get("/health") == (200, '{"status":"ok"}')
    server.close()


def test_pages_of_other_sites_may_call_where_they_are_allowed(server, make_engine):
    asked = {"origin": "http://site", "access-control-request-method": "POST"}
    status, headers, _ = server.request("OPTIONS", "/v1/completions", **asked)
    assert (status, "access-control-allow-origin" in headers) == (405, False)
    open_server = Server(make_engine(), origins=["http://site"], api_key="key")
    status, headers, _ = open_server.request("OPTIONS", "/v1/completions", **asked)
    assert (status, headers["access-control-allow-origin"]) == (200, "http://site")
    open_server.close()


def test_request_ids_come_back(server):
    _, headers, text = server.post(
        "/v1/completions", '{"prompt": [5], "max_tokens": 1}', **{"x-request-id": "mine-1"}
    )
    assert headers["x-request-id"] == "mine-1"
    assert json.loads(text)["id"] == "cmpl-mine-1"
    wait_for(lambda: server.engine.stats().num_running == 0)
