"""What two-batch overlap hides of tensor parallelism, over links of several speeds.

    python -m benchmarks.overlap [--tokens 256 512 1024 2048] [--delays 0 1] [--trace]

Processes with one thread each share a hybrid model and prefill; times are those of the clock. A
delay of 1 is a link that carries a message of the whole step in as long as the model computes from
one message to the next; 0 is the machine's own. The runs of a size are interleaved, and logits with
overlap are compared to those without before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

import torch_hybrid as th
from torch_hybrid.backends.mode import Mode
from torch_hybrid.graphs.two_batch import overlap_policy
from torch_hybrid.parallel.link import LinkedGroup, Message, hidden_share, linked_group

NUM_SEQS = 4
VOCAB_SIZE = 256


@dataclass(frozen=True)
class Timed:
    """Seconds of the fastest step and of the middle one, and the messages of the fastest."""

    best: float
    median: float
    messages: list[Message]


def make_model(num_layers: int, dim: int) -> th.HybridModel:
    """A random dense Qwen3-Next: three linear layers to a full one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=dim // 8,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=dim // 8,
        linear_value_head_dim=dim // 8,
        num_experts=0,
    )
    return th.adapt(Qwen3NextForCausalLM(config))


def prefill(runner: th.Runner, num_tokens: int) -> tuple[Tensor, float]:
    """Logits of one step of so many new tokens, and its seconds."""
    seqs = runner.new_sequences(NUM_SEQS)
    tokens = [
        [(7 * i + row) % VOCAB_SIZE for i in range(num_tokens // NUM_SEQS)] for row in range(4)
    ]
    dist.barrier()
    start = time.perf_counter()
    logits = runner.extend(seqs, tokens)
    seconds = time.perf_counter() - start
    runner.free(seqs)
    return logits, seconds


def time_steps(
    runners: dict[str, th.Runner], group: LinkedGroup, num_tokens: int, rounds: int
) -> dict[str, Timed]:
    """The runners by turns."""
    taken: dict[str, list[tuple[float, list[Message]]]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            group.messages.clear()
            _, seconds = prefill(runner, num_tokens)
            taken[name].append((seconds, list(group.messages)))
    fastest = {name: min(steps, key=lambda step: step[0]) for name, steps in taken.items()}
    return {
        name: Timed(best, statistics.median(s for s, _ in taken[name]), messages)
        for name, (best, messages) in fastest.items()
    }


def set_delay(group: LinkedGroup, delay: float, whole: Timed) -> float:
    """Make a message of the whole step take ``delay`` times what lies between two; in seconds."""
    seconds = torch.tensor(delay * whole.best / len(whole.messages), dtype=torch.float64)
    dist.broadcast(seconds, 0)
    group.seconds_per_byte = seconds.item() / max(message.num_bytes for message in whole.messages)
    return seconds.item()


def hidden(timed: Timed, link: float) -> str:
    """The share that was hidden, where a link holds messages back."""
    return f"{hidden_share(timed.messages):.0%}" if link else "-"


def draw(messages: list[Message], width: int = 100) -> str:
    """A line for each message: ``=`` beside other work, ``#`` while it was waited for."""
    first, last = messages[0].start, max(message.wait_end for message in messages)

    def column(seconds: float) -> int:
        return round((seconds - first) / (last - first) * width)

    lines = []
    for message in messages:
        start, wait, end = (
            column(t) for t in (message.start, message.wait_start, message.wait_end)
        )
        lines.append(" " * start + "=" * (wait - start) + "#" * (end - wait))
    return "\n".join(lines)


def run(rank: int, store: str, args: argparse.Namespace) -> None:
    """What one process does; the first one prints."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.ranks)
    group = linked_group(timeout_s=600.0)
    model = th.shard(make_model(args.layers, args.dim), group)
    sizes: dict[str, Any] = {"max_seqs": 8, "max_tokens": max(args.tokens), "kv_tokens": 8192}
    runners = {
        name: th.Runner(model, **sizes, two_batch_overlap=name)  # type: ignore[arg-type]
        for name in ("off", "on")
    }
    for num_tokens in args.tokens:
        off, on = (prefill(runner, num_tokens)[0] for runner in runners.values())
        error = ((on - off).abs().max() / off.abs().max()).item()
        assert error < 2e-5, f"overlap changes logits by {error:.1e} of the largest"
    if rank == 0:
        print(f"{args.ranks} processes, {args.layers} layers of width {args.dim}; ms of a prefill")
        print("tokens  link ms     off      on    gain   hidden off, on   auto")
    auto = overlap_policy("auto", num_ranks=args.ranks)
    for num_tokens in args.tokens:
        group.seconds_per_byte = 0.0
        alone = time_steps(runners, group, num_tokens, args.rounds)["off"]
        for delay in args.delays:
            link = set_delay(group, delay, alone)
            timed = time_steps(runners, group, num_tokens, args.rounds)
            if rank == 0:
                off, on = timed["off"], timed["on"]
                choice = "on" if auto.cuts(Mode.EXTEND, NUM_SEQS, num_tokens) else "off"
                print(
                    f"{num_tokens:6} {1e3 * link:8.2f} {1e3 * off.best:7.1f} {1e3 * on.best:7.1f} "
                    f"{off.best / on.best:7.2f}   {hidden(off, link):>8} {hidden(on, link):>6}"
                    f"   {choice}",
                    flush=True,
                )
                if args.trace:
                    for name in timed:
                        print(f"{name}:\n{draw(timed[name].messages)}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trace", action="store_true", help="draw the messages of a step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        torch.multiprocessing.spawn(run, args=(store, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
