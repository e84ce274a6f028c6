"""Our server beside others: llama.cpp's ``llama-server`` and ``transformers serve``, by turns.

    python -m benchmarks.http_against [--llama-server PROGRAM] [--transformers] [--clients 8 32]

All serve the same random weights in float32, with as many slots and the same threads, and the same
clients ask each of them in turn, for greedy texts of a set length: in each round so many at once,
and then the second turn of a conversation, whose first turn they have just served. Prompts are
letters, a token each. transformers batches no linear attention continuously, and so answers one
after the other. Figures are ratios of medians, for the machine may have other work. The first round
warms up; a server that takes longer than ``--patience`` is not asked again, and its first time
stands.

``llama-server`` is built from the source of llama-cpp-python (``vendor/llama.cpp``), for this
machine: ``cmake -B build && cmake --build build --target llama-server``; ``pip install gguf``.
``transformers serve`` needs ``pip install fastapi python-multipart``. On a slow machine
``--rounds 1 --new 32`` asks for little, and each time is printed as it is taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import string
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.llama_cpp_weights import LLAMA_CPP, write_gguf
from benchmarks.models import make_model
from benchmarks.results import Results, Target, arguments, parse, title

FASTER = 1.2  # than the better of the others
TURN = 3_900  # tokens of a conversation's first turn
SHORTEST, LONGEST = 16, 256  # tokens of the prompts of many clients


def make_tokens(vocab_size: int) -> list[str]:
    """Names of tokens: bytes, and words that no text is encoded to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*alphabet, *(f"Ġ{number}" for number in range(vocab_size - len(alphabet)))]


def save(folder: Path, options: Any) -> None:
    """Write a checkpoint and, where it is known there, the file of llama.cpp."""
    model = make_model(options.model, options.torch_dtype, quick=options.quick)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    tokens = make_tokens(model.config.vocab_size)
    words = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    if options.llama_server is not None:
        write_gguf(model, options.model, folder / "model.gguf", tokens=tokens)


class Server:
    """A server in a process of its own."""

    def __init__(self, name: str, command: list[str], folder: Path, threads: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.name, self.seconds = name, dict[str, list[float]]()
        self._model, self._log = str(folder), folder / f"{name}.log"
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"{name} has ended:\n{self._log.read_text()[-2000:]}")
            sleep(0.5)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health") as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def ask(self, prompts: list[str], num_new: int) -> float:
        """Seconds until all prompts, asked at once, are answered."""
        options = {"model": self._model, "max_tokens": num_new, "temperature": 0.0}
        begun = perf_counter()
        answers = asyncio.run(self._ask_all([{"prompt": p, **options} for p in prompts]))
        seconds = perf_counter() - begun
        for prompt, usage in zip(prompts, answers, strict=True):
            assert usage["completion_tokens"] == num_new, (self.name, usage)
            assert usage["prompt_tokens"] == len(prompt), (self.name, usage)
        return seconds

    async def _ask_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._ask, bodies))

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        answer = (await reader.read(-1)).decode()
        writer.close()
        if not answer.startswith("HTTP/1.1 200"):
            raise RuntimeError(f"{self.name}: {answer[:500]}\n{self._log.read_text()[-2000:]}")
        usage: dict[str, Any] = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
        return usage["usage"]

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def commands(folder: Path, options: Any, slots: int, turn: int) -> dict[str, list[str]]:
    """How each server is started, ours first."""
    room = slots * (LONGEST + options.new) + 2 * (turn + 64 + options.new)
    bin_, path = Path(sys.executable).parent, str(folder)
    ours = [sys.executable, "-m", "torch_hybrid.cli", "serve", path, "--compile", "on"]
    ours += ["--max-seqs", str(slots), "--kv-tokens", str(-(-room // 256) * 256)]
    made = {"torch_hybrid": ours}
    if options.llama_server is not None:
        each = -(-max(LONGEST + options.new, turn + 64 + options.new) // 256) * 256
        made["llama-server"] = [options.llama_server, "-m", f"{path}/model.gguf", "--host"]
        made["llama-server"] += ["127.0.0.1", "-np", str(slots), "-c", str(slots * each)]
        made["llama-server"] += ["-t", str(options.threads), "-tb", str(options.threads)]
    if options.transformers:
        made["transformers"] = [str(bin_ / "transformers"), "serve", path, "--device", "cpu"]
        made["transformers"] += ["--host", "127.0.0.1"]
    return made


def letters(draw: random.Random, count: int) -> str:
    """A prompt of so many tokens."""
    return "".join(draw.choices(string.ascii_letters, k=count))


def measure(servers: list[Server], options: Any, turn: int) -> None:
    """Ask all servers in turn; keep the seconds of each, those that warm up first."""
    draw = random.Random(0)
    for _ in range(options.rounds + 1):
        work: dict[str, list[list[str]]] = {}
        for count in options.clients:
            lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(count)]
            work[f"{count} clients"] = [[letters(draw, length) for length in lengths]]
        first = letters(draw, turn)
        work["second turn"] = [[first], [first + letters(draw, 64)]]
        for name, turns in work.items():
            for server in servers:
                known = server.seconds.setdefault(name, [])
                if known and known[0] > options.patience:
                    continue
                *_, seconds = [server.ask(prompts, options.new) for prompts in turns]
                known.append(seconds)
                print(f"{name}, {server.name}: {seconds:.2f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Start the servers, measure, print."""
    parser = arguments("Our server beside others.")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--transformers", action="store_true", help="beside transformers serve")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=15, help="seconds; see above")
    options = parse(parser)
    if options.llama_server is not None and options.model not in LLAMA_CPP:
        parser.error(f"llama.cpp has no form of {options.model}; it has {[*LLAMA_CPP]}")
    turn = 200 if options.quick else TURN
    slots, options.threads = max(options.clients), torch.get_num_threads()
    servers: list[Server] = []
    with TemporaryDirectory() as folder:
        save(Path(folder), options)
        try:
            for name, command in commands(Path(folder), options, slots, turn).items():
                servers.append(Server(name, command, Path(folder), options.threads))
            measure(servers, options, turn)
        finally:
            for server in servers:
                server.close()
    print_results(servers, options)


def print_results(servers: list[Server], options: Any) -> None:
    """Print the medians, and how ours compares with the better of the others."""
    results = Results(
        title=title(options, "HTTP beside others"), columns=["", "seconds", "times ours"]
    )
    medians = {
        server.name: {
            name: statistics.median(each[1:] or each) for name, each in server.seconds.items()
        }
        for server in servers
    }
    ours, *others = medians.values()
    for server, seconds in medians.items():
        for name, each in seconds.items():
            results.add(f"{name}, {server}", each, each / ours[name])
    for name in ours if others else ():
        ratio = min(other[name] for other in others) / ours[name]
        results.targets.append(Target(name=name, measured=ratio, limit=FASTER, at_least=True))
    results.emit(options)


if __name__ == "__main__":
    main()
