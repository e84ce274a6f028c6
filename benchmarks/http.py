"""Streams through HTTP beside the engine alone, and many streams that are open at once.

    python -m benchmarks.http [--model NAME | --demo] [--streams N] [--new N] [--open N]

The server's event loop and stepping thread are in this process, its clients in another one. Rounds
go by turns: ``Engine.generate`` streams all prompts, and then clients ask for the same ones, each
on a connection of its own. Texts are compared. Clients read bytes and decode them afterwards: what
is measured is the server. At the end so many streams are held open at once, and counted.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch_hybrid as th
from benchmarks.models import make_model
from benchmarks.results import Results, Target, arguments, parse, title
from benchmarks.serve import make_prompts
from torch_hybrid.serving.engine import Engine

SHARE = 0.95
MAX_TOKENS = 1024  # of an engine's step


class WordTokenizer:
    """A tokenizer without files: token 7 is the text " 7"."""

    def encode(self, text: str) -> list[int]:
        return list(map(int, text.split()))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(f" {token}" for token in token_ids)


class Clients:
    """Clients in a process of their own, which ask when they are told to."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.http", "--clients", str(port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, **pipes)

    def ask(self, bodies: list[dict[str, Any]]) -> tuple[float, list[str]]:
        """Seconds until all streams have ended, and their texts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(bodies), file=self._process.stdin, flush=True)
        seconds, texts = json.loads(self._process.stdout.readline())
        return seconds, texts

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run_clients(port: int) -> None:
    """Ask for what each line of stdin lists, all at once; write the seconds and the texts."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_ask_all(port, json.loads(line)))), flush=True)


async def _ask_all(port: int, bodies: list[dict[str, Any]]) -> tuple[float, list[str]]:
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in bodies]
    begun = perf_counter()
    pairs = zip(connections, bodies, strict=True)
    answers = await asyncio.gather(*(_ask(*connection, body) for connection, body in pairs))
    return perf_counter() - begun, [_text_of(answer) for answer in answers]


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]
) -> bytes:
    content = json.dumps(body)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content.encode()
    )
    answer = await reader.read(-1)
    writer.close()
    return answer


def _text_of(answer: bytes) -> str:
    lines = [line for line in answer.decode().splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def start_server(engine: Engine) -> tuple[int, Any]:
    """Serve an engine in a thread of this process; the port and uvicorn's server."""
    import uvicorn

    from torch_hybrid.http import create_app

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(create_app(lambda: engine, model="model"), log_config=None)
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    return listener.getsockname()[1], server


def generate(engine: Engine, prompts: list[list[int]], num_new: int) -> tuple[float, list[str]]:
    """Seconds and texts of ``Engine.generate``, as a stream."""
    sampling = th.Sampling(max_new_tokens=num_new, ignore_eos=True)
    begun, texts = perf_counter(), [""] * len(prompts)
    for event in engine.generate(prompts, sampling, stream=True):
        texts[event.request.index] += event.text
    return perf_counter() - begun, texts


def body_of(prompt: list[int], num_new: int) -> dict[str, Any]:
    """The same request over HTTP."""
    options = {"temperature": 0, "ignore_eos": True, "stream": True}
    return {"prompt": prompt, "max_tokens": num_new, **options}


def rss() -> float:
    """The peak of this process's memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Serve by turns, compare, print."""
    if sys.argv[1:2] == ["--clients"]:
        run_clients(int(sys.argv[2]))
        return
    parser = arguments("Streams through HTTP beside the engine alone.")
    parser.add_argument("--demo", action="store_true", help="the demo's model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--new", type=int, default=64, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--open", type=int, default=1000, help="streams held open at once")
    options = parse(parser)
    count, num_new = (4, 8) if options.quick else (options.streams, options.new)
    num_open = 2 * count if options.quick else options.open
    if options.demo:
        options.model = "demo"
        model = th.from_pretrained(Path(th.__file__).parent / "demo" / "recall")
    else:
        model = th.adapt(make_model(options.model, options.torch_dtype, quick=options.quick))
    prompts = make_prompts(count, model.vocab_size, longest=64)
    runner = th.Runner(
        model, max_seqs=count, max_tokens=MAX_TOKENS, kv_tokens=count * (64 + num_new + 16)
    )
    runner.warm_up()
    engine = Engine(runner, WordTokenizer(), max_waiting=max(count, num_open))
    port, server = start_server(engine)
    clients = Clients(port)
    bodies = [body_of(prompt, num_new) for prompt in prompts]

    alone, served, cpu = [], [], {"alone": 0.0, "served": 0.0}
    _, expected = generate(engine, prompts, num_new)
    for number in range(options.rounds + 1):
        begun = process_time()
        alone.append(generate(engine, prompts, num_new)[0])
        between = process_time()
        seconds, texts = clients.ask(bodies)
        cpu["alone"] += between - begun
        cpu["served"] += process_time() - between
        assert texts == expected, "texts through HTTP are others"
        served.append(seconds)
        if number == 0:  # connections, threads and allocators have come
            alone, served, cpu = [], [], {"alone": 0.0, "served": 0.0}
    share = statistics.median(a / b for a, b in zip(alone, served, strict=True))
    total = count * num_new

    results = Results(title=title(options, "HTTP"), columns=["", "seconds", "tokens/s"])
    results.add("Engine.generate", min(alone), total / min(alone))
    results.add(f"{count} streams through HTTP", min(served), total / min(served))
    spent = cpu["alone"] / cpu["served"]
    results.notes.append(f"CPU time alone, as a share of that with HTTP: {spent:.3f}")
    before = rss()
    many = [body_of(prompts[n % count], 8) for n in range(num_open)]
    seconds, texts = clients.ask(many)
    assert texts == [expected[n % count][: len(text)] for n, text in enumerate(texts)]
    assert len({len(text.split()) for text in texts}) == 1
    results.add(f"{num_open} streams at once, 8 tokens each", seconds, 8 * num_open / seconds)
    results.notes.append(f"texts equal: all; memory for the open streams: {rss() - before:.0f} MiB")
    results.targets.append(
        Target(name="share of the engine's tokens/s", measured=share, limit=SHARE, at_least=True)
    )
    clients.close()
    server.should_exit = True
    results.emit(options)


if __name__ == "__main__":
    main()
