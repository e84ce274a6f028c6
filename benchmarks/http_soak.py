"""A soak of the HTTP server by random clients, by hand: nothing lost, no slot or page leaked.

    python -m benchmarks.http_soak [--minutes N] [--clients N] [--ranks]

Clients stream, ask for whole answers, leave in the middle, send bad bodies and prompts that are too
long, and every greedy answer is compared with the first one of its prompt. At the end all slots and
pages are free, and memory is compared with that after the first tenth of the time.

With ``--ranks`` two processes share the model behind the command line. At the end one of them is
killed beside open streams: clients are told, and the other process ends with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import torch_hybrid as th
from benchmarks.http import WordTokenizer, start_server
from torch_hybrid.serving.engine import Engine

RECALL = Path(th.__file__).parent / "demo" / "recall"
Answers = dict[tuple[int, ...], bytes]


async def ask(port: int, body: bytes, *, leaves_after: int | None = None) -> bytes:
    """Send a body and read the answer; or leave when so many bytes have come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await (reader.read(-1) if leaves_after is None else reader.read(leaves_after))
    writer.close()
    return answer


async def client(port: int, seed: int, end: float, seen: Answers, counts: Counter[str]) -> None:
    """Behave like all clients together, at random."""
    draw = random.Random(seed)
    while monotonic() < end:
        prompt = [draw.randrange(4, 20) for _ in range(draw.randint(1, 4))]
        body = {"prompt": prompt, "max_tokens": draw.randint(1, 60)}
        kind = draw.choice(["stream", "whole", "leaves", "sampled", "bad", "long", "garbage"])
        counts[kind] += 1
        if kind == "garbage":
            status = (await ask(port, draw.randbytes(200)))[9:12]
            assert status == b"400", status
        elif kind in ("bad", "long"):
            body |= {"temperature": -1} if kind == "bad" else {"prompt": [5] * 100_000}
            assert (await ask(port, json.dumps(body).encode()))[9:12] == b"400"
        elif kind == "leaves":
            body |= {"stream": draw.random() < 0.5, "max_tokens": 500}
            await ask(port, json.dumps(body).encode(), leaves_after=draw.randint(1, 900))
        elif kind == "sampled":
            body |= {"temperature": 1.0, "n": 3, "top_p": 0.9, "stream": draw.random() < 0.5}
            assert (await ask(port, json.dumps(body).encode()))[9:12] in (b"200", b"429")
        else:
            body |= {"max_tokens": 30, "stream": kind == "stream"}
            answer = await ask(port, json.dumps(body).encode())
            if answer[9:12] == b"429":
                counts["429"] += 1
                continue
            text = text_of(answer)
            assert seen.setdefault(tuple(prompt), text) == text, prompt


def text_of(answer: bytes) -> bytes:
    """The text of a completion, whole or streamed."""
    body = answer.partition(b"\r\n\r\n")[2]
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line[6:]) for line in lines] or [json.loads(body)]
    return b"".join(chunk["choices"][0]["text"].encode() for chunk in chunks)


def rss(process: int | str) -> float:
    """Memory of a process now, in MiB."""
    fields = Path(f"/proc/{process}/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


async def soak(
    port: int, seconds: float, num_clients: int, process: int | str = "self"
) -> Counter[str]:
    """Run clients until the end; print the server's memory ten times."""
    end, seen, counts = monotonic() + seconds, Answers(), Counter[str]()
    clients = [client(port, seed, end, seen, counts) for seed in range(num_clients)]
    running = asyncio.gather(*clients)
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
        print(f"{rss(process):.0f} MiB, {sum(counts.values())} requests", flush=True)
    await running
    return counts


class Ranks:
    """Two processes of the command line that share the demo's model."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._variables = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
            self._variables |= {"MASTER_PORT": str(free.getsockname()[1])}
        self._log = folder / "log"
        self.processes = [self._start(rank) for rank in range(2)]
        while not (found := re.search(r"listening on \S+:(\d+)", self._log.read_text())):
            self._check()
        self.port = int(found[1])
        while b"200" not in asyncio.run(self.get("/health"))[:15]:
            self._check()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch_hybrid.cli", "serve", str(RECALL), "--ranks"]
        command += ["--device", "cpu", "--eager", "--port", "0", "--max-seqs", "8"]
        command += ["--kv-tokens", "1024", "--speculate", "ngram", "--max-queue", "64"]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **self._variables, **own}
        with self._log.open("a") as log:
            return subprocess.Popen(command, stderr=log, env=environment)

    def _check(self) -> None:
        sleep(0.2)
        if any(process.poll() is not None for process in self.processes):
            raise RuntimeError(f"a rank has ended:\n{self._log.read_text()}")

    async def get(self, path: str) -> bytes:
        """Ask for a page."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read(-1)
        writer.close()
        return answer

    async def lose_one(self, num_clients: int) -> list[bytes]:
        """Kill rank 1 beside open streams; return what their clients read until the end."""
        body = {"prompt": [5, 6], "max_tokens": 900, "ignore_eos": True, "stream": True}
        asked = [ask(self.port, json.dumps(body).encode()) for _ in range(num_clients)]
        answers = asyncio.gather(*asked)
        await asyncio.sleep(1)
        self.processes[1].kill()
        return await answers


def soak_ranks(options: argparse.Namespace, folder: Path) -> None:
    """Soak two ranks, then kill one."""
    ranks = Ranks(folder)
    process = ranks.processes[0]
    seconds = 60 * options.minutes
    counts = asyncio.run(soak(ranks.port, seconds, options.clients, process.pid))
    while b'num_requests_running{model_name="%b"} 0.0' % bytes(RECALL) not in (
        metrics := asyncio.run(ranks.get("/metrics"))
    ):
        sleep(0.1)  # clients that left last
    print(dict(counts))
    assert b'kv_cache_usage_perc{model_name="%b"} 0.0' % bytes(RECALL) in metrics
    begun = monotonic()
    answers = asyncio.run(ranks.lose_one(options.clients))
    told = Counter(
        "an error in the stream" if b'data: {"error"' in answer else answer[9:12].decode()
        for answer in answers
    )
    assert not any(b"[DONE]" in answer for answer in answers)
    code = process.wait(60)
    print(f"a rank was killed: after {monotonic() - begun:.1f} s the other ended with {code}")
    print(f"its clients were told: {dict(told)}")
    assert code != 0


def main() -> None:
    """Soak a server of the demo's model, and look at what is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--ranks", action="store_true")
    options = parser.parse_args()
    if options.ranks:
        with TemporaryDirectory() as folder:
            soak_ranks(options, Path(folder))
        return
    model = th.from_pretrained(RECALL)
    sizes = {"max_seqs": 8, "max_tokens": 128, "kv_tokens": 1024}
    runner = th.Runner(model, **sizes, max_snapshots=8, max_drafts=2, compile=False)
    drafts = th.Speculation("ngram", num_drafts=2)
    engine = Engine(runner, WordTokenizer(), max_waiting=64, prefix_cache=True, speculate=drafts)
    free = runner.free_slots, runner.free_pages
    port, server = start_server(engine)
    counts = asyncio.run(soak(port, 60 * options.minutes, options.clients))
    while engine.has_unfinished:  # of clients that left last
        sleep(0.1)
    server.should_exit = True
    print(dict(counts), engine.stats())
    engine.close()
    assert (runner.free_slots, runner.free_pages) == free
    print("all slots and pages are free")


if __name__ == "__main__":
    main()
