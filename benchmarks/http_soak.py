"""A soak of the HTTP server by random clients, by hand: nothing lost, no slot or page leaked.

    python -m benchmarks.http_soak [--minutes N] [--clients N]

Clients stream, ask for whole answers, leave in the middle, send bad bodies and prompts that are too
long, and every greedy answer is compared with the first one of its prompt. At the end all slots and
pages are free, and memory is compared with that after the first tenth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from time import monotonic, sleep

import torch_hybrid as th
from benchmarks.http import WordTokenizer, start_server
from torch_hybrid.serving.engine import Engine

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


def rss() -> float:
    """Memory of this process now, in MiB."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


async def soak(port: int, seconds: float, num_clients: int) -> Counter[str]:
    """Run clients until the end; print memory ten times."""
    end, seen, counts = monotonic() + seconds, Answers(), Counter[str]()
    clients = [client(port, seed, end, seen, counts) for seed in range(num_clients)]
    running = asyncio.gather(*clients)
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
        print(f"{rss():.0f} MiB, {sum(counts.values())} requests", flush=True)
    await running
    return counts


def main() -> None:
    """Soak a server of the demo's model, and look at what is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    options = parser.parse_args()
    model = th.from_pretrained(Path(th.__file__).parent / "demo" / "recall")
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
