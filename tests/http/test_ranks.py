"""``torch-hybrid serve --ranks``: two processes share the demo's model, and rank 0 serves it."""

import http.client
import json
import os
import re
import runpy
import sys
import time

import pytest
import torch

import torch_hybrid as th
from tests.http.conftest import RECALL, prompt_of, tokenizers, transformers, wait_for
from tests.parallel.processes import FORKSERVER

LIMIT_S = 120
OPTIONS = ["--ranks", "--device", "cpu", "--eager", "--port", "0", "--max-seqs", "4"]


def run_rank(arguments, environment, log):
    """The command line, as a process of torchrun's, which writes its messages to ``log``."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv[1:] = arguments
    runpy.run_module("torch_hybrid.cli", run_name="__main__")


class Ranks:
    """Processes of a server, by rank, with the variables that torchrun sets."""

    def __init__(self, checkpoint, folder, port, options=()):
        self._log, self._checkpoint, self._options = folder / "err", checkpoint, options
        self._log.touch()
        self.processes = [self._start(rank, folder, port) for rank in range(2)]
        wait_for(lambda: "listening on" in self.log or not self.processes[0].is_alive())
        self.port = int(re.search(r"listening on http://127.0.0.1:(\d+)", self.log)[1])
        wait_for(lambda: self.ask("GET", "/health")[0] == 200)

    def _start(self, rank, folder, port):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        environment = {name: str(value) for name, value in {**ranks, **where}.items()}
        log = self._log if rank == 0 else folder / "err1"
        arguments = ["serve", str(self._checkpoint), *OPTIONS, *self._options]
        process = FORKSERVER.Process(target=run_rank, args=(arguments, environment, log))
        process.start()
        return process

    @property
    def log(self):
        return self._log.read_text()

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        headers = {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    def ends(self):
        """Exit codes of both."""
        for process in self.processes:
            process.join(LIMIT_S)
        return [process.exitcode for process in self.processes]


def characters():
    """A tokenizer of printable characters, which grammars can read."""
    vocab = {"<end>": 0, "Ġ": 1} | {chr(code): code - 31 for code in range(33, 127)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


@pytest.fixture
def checkpoint(tmp_path):
    """The demo's model with a tokenizer of characters."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(RECALL / name)
    characters().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def options():
    """More of the command line."""
    return ()


@pytest.fixture
def ranks(checkpoint, tmp_path, unused_port, options):
    started = Ranks(checkpoint, tmp_path, unused_port, options)
    yield started
    for process in started.processes:
        process.kill()
        process.join()


@pytest.fixture
def unused_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def running(ranks):
    """Number of requests that run, as rank 0 tells."""
    metrics = ranks.ask("GET", "/metrics")[1]
    return float(re.search(r"^vllm:num_requests_running{.*} (\S+)", metrics, re.MULTILINE)[1])


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Folder of an adapter of the demo's model."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(RECALL),
        peft.LoraConfig(init_lora_weights=False, target_modules="all-linear", r=4),
    )
    model.save_pretrained(folder)
    return folder


class TestWithAnAdapter:
    @pytest.fixture
    def options(self, adapter):
        return "--lora", f"other={adapter}"

    def test_texts_are_those_of_one_rank(self, ranks, recall, adapter):
        """Greedy and drawn, by grammars and without, with the adapter, after a client that left and
        a request that is refused; SIGTERM to all ends all of them well."""
        pytest.importorskip("llguidance")
        left = http.client.HTTPConnection("127.0.0.1", ranks.port, timeout=LIMIT_S)
        body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        headers = {"content-type": "application/json"}
        left.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = left.getresponse()
        assert answer.status == 200
        assert running(ranks) == 1
        answer.close()
        left.close()
        wait_for(lambda: running(ranks) == 0)
        sizes = {"max_seqs": 4, "max_tokens": 64, "kv_tokens": 2048, "max_adapters": 1}
        runner = th.Runner(recall, compile=False, **sizes)
        engine = th.Engine(runner, characters(), eos_token_ids=[], adapters={"other": adapter})
        schema = {"type": "array", "items": {"enum": ["a", 12]}, "minItems": 2, "maxItems": 4}
        of_json = th.Grammar.json_schema(schema), {"structured_outputs": {"json": schema}}
        of_regex = th.Grammar.regex("[ab]{3}c"), {"structured_outputs": {"regex": "[ab]{3}c"}}
        free, drawn, found = (None, {}), {"temperature": 1.0, "seed": 5}, []
        for options, (grammar, given), name in (
            *(({"temperature": 0.0}, each, None) for each in (of_json, of_regex, free)),
            *((drawn, each, None) for each in (of_json, of_regex, free)),
            (drawn, free, "other"),
        ):
            prompts = ["abc", "b", "some words"]
            body = {"prompt": prompts, "max_tokens": 30, **options, **given}
            body |= {} if name is None else {"model": name}
            status, text = ranks.ask("POST", "/v1/completions", body)
            assert status == 200, text
            sampling = th.Sampling(max_new_tokens=30, grammar=grammar, **options)
            outputs = engine.generate(prompts, sampling, adapter=name)
            texts = [output.text for output in sorted(outputs, key=lambda output: output.index)]
            found.append([choice["text"] for choice in json.loads(text)["choices"]])
            assert found[-1] == texts
        assert found[-1] != found[-2]
        refused = {"prompt": "a", "structured_outputs": {"regex": "("}}
        assert ranks.ask("POST", "/v1/completions", refused)[0] == 400
        body = {"prompt": "abc", "max_tokens": 12, "temperature": 1.0, "n": 3}
        assert ranks.ask("POST", "/v1/completions", body)[0] == 200  # drawn without a seed
        for process in ranks.processes:
            process.terminate()
        assert ranks.ends() == [0, 0], ranks.log


def test_a_rank_that_dies_ends_the_other(ranks):
    ranks.processes[1].kill()
    body = {"prompt": prompt_of(1), "max_tokens": 12}
    begun = time.monotonic()
    assert ranks.ask("POST", "/v1/completions", body)[0] in (500, 503)
    assert ranks.ends()[0] == 1
    assert time.monotonic() - begun < 60
    assert "a step of the ranks failed" in ranks.log
