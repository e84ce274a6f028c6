"""A server of the demo's model on a free port, with OpenAI's own client and a gate before steps."""

import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import torch_hybrid as th
import torch_hybrid.demo

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

RECALL = Path(torch_hybrid.demo.__file__).parent / "recall"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<3>{% endif %}"
)
MAX_SEQS, MAX_WAITING, ROOM = 4, 6, 512


def word_tokenizer():
    """A tokenizer of the demo's symbols: token 7 is the word w7."""
    vocab = {f"<{n}>" if n < 4 else f"w{n}": n for n in range(128)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<0>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<0>", chat_template=TEMPLATE
    )


def words(tokens):
    return " ".join(f"<{token}>" if token < 4 else f"w{token}" for token in tokens)


def prompt_of(seed, num_writes=6):
    """Tokens of a recall prompt; each seed has its own."""
    symbols = [4 + (seed * 7 + n * 11) % 124 for n in range(num_writes + 1)]
    pairs = zip(symbols, [*symbols[1:], symbols[0]], strict=True)
    return [1, *(token for key, value in pairs for token in (2, key, value)), 3, symbols[0]]


class Gate:
    """An engine whose steps wait while the gate is closed; ``raises`` are raised by steps, once."""

    def __init__(self, engine):
        self.engine, self._opened, self._step = engine, threading.Event(), engine.step
        self.num_steps, self.raises = 0, []
        engine.step = self._gated
        self._opened.set()

    def _gated(self):
        self._opened.wait()
        if self.raises and self.engine.has_unfinished:
            loop = self.engine._loop
            start = loop._start

            def broken(rows):  # not called where a step only ends what was cancelled
                raise self.raises.pop()

            loop._start = broken
            try:
                return self._step()
            finally:
                loop._start = start
        events = self._step()
        self.num_steps += bool(events)
        return events

    @contextmanager
    def closed(self):
        self._opened.clear()
        try:
            yield
        finally:
            self._opened.set()


class Server:
    """A server in this process, and clients of it."""

    def __init__(self, engine, **options):
        import uvicorn

        from torch_hybrid.http import create_app

        self.gate, self.engine = Gate(engine), engine
        self.app = create_app(lambda: engine, model="demo", **options)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app, log_config=None, timeout_graceful_shutdown=5)
        self.uvicorn = uvicorn.Server(config)
        options = {"sockets": [listener]}
        self._thread = threading.Thread(target=self.uvicorn.run, kwargs=options, daemon=True)
        self._thread.start()
        self.client = self.client_of("key")
        wait_for(lambda: self.uvicorn.started and self.get("/health")[0] == 200)

    def client_of(self, key):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def request(self, method, path, body=None, **headers):
        """Status, headers and text of a plain request."""
        from http.client import HTTPConnection

        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return found

    def get(self, path):
        status, _, text = self.request("GET", path)
        return status, text

    def post(self, path, body, **headers):
        return self.request("POST", path, body, **{"content-type": "application/json", **headers})

    def close(self):
        self.uvicorn.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def wait_for(condition):
    """Wait until a condition holds that another thread brings about."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "waited for a minute"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def recall():
    """The demo's model."""
    return th.from_pretrained(RECALL)


@pytest.fixture(scope="session")
def make_engine(recall):
    def make_engine(**options):
        runner = th.Runner(
            recall,
            max_seqs=MAX_SEQS,
            max_tokens=64,
            kv_tokens=ROOM,
            page_size=16,
            max_snapshots=4,
            max_drafts=2,
            max_adapters=1,
            compile=False,
        )
        return th.Engine(runner, word_tokenizer(), **options)

    return make_engine


@pytest.fixture(scope="module")
def server(make_engine):
    engine = make_engine(prefix_cache=True, max_waiting=MAX_WAITING)
    started = Server(engine, max_body=100_000)
    yield started
    started.close()


@pytest.fixture(scope="module")
def engine(make_engine):
    """An engine like the server's, for the answers that are expected."""
    return make_engine()
