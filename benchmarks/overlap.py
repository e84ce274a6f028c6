"""What two-batch overlap hides of tensor parallelism, over links of several speeds.

    python -m benchmarks.overlap [--tokens 256 512 1024 2048] [--delays 0 1] [--trace]
    python -m benchmarks.overlap --device cuda [--dim 4096] [--layers 8] [--prefill-only]

Processes with one thread each share a hybrid model and prefill; times are those of the clock. A
delay of 1 is a link that carries a message of the whole step in as long as the model computes from
one message to the next; 0 is the machine's own. The runs of a size are interleaved, and logits with
overlap are compared to those without before anything is timed.

With ``--device cuda`` each process has a GPU, the link is NCCL's, the model is in bfloat16, and
steps, decode too, are captured in CUDA graphs with their collectives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

import torch_hybrid as th
from benchmarks import models
from benchmarks.cuda_graphs import milliseconds
from examples.slow_link import LinkedGroup, Message, hidden_share, linked_group
from torch_hybrid.backends.mode import Mode
from torch_hybrid.caches.sequence import Sequence

NUM_SEQS = 4
VOCAB_SIZE = 256
PREFILLS = (1024, 2048, 4096, 8192)  # tokens of a step on GPUs
DECODES = (64, 128, 256, 512)  # sequences
CONTEXT = 1024  # tokens of each sequence that decodes


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
    for num_tokens in args.tokens:
        group.seconds_per_byte = 0.0
        alone = time_steps(runners, group, num_tokens, args.rounds)["off"]
        for delay in args.delays:
            link = set_delay(group, delay, alone)
            auto = th.Runner(model, **sizes, compile=False, two_batch_overlap="auto").overlap
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


def run_on_gpus(rank: int, store: str, args: argparse.Namespace) -> None:
    """What one process does, on a GPU of its own; the first one prints."""
    torch.cuda.set_device(rank)
    # Blocks of a sum are placed before those of a product that was launched earlier.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(
        "nccl", init_method=store, rank=rank, world_size=args.ranks, pg_options=options
    )
    sizes = {
        "hidden_size": args.dim,
        "intermediate_size": 3 * args.dim,
        "num_hidden_layers": args.layers,
        "max_position_embeddings": 2 * max(args.tokens),
    }
    made = models.make_model("qwen3_next", torch.bfloat16, device="cuda", **sizes)
    model = th.shard(th.adapt(made))
    make = (
        partial(prefill_runner, model, max(args.tokens))
        if args.prefill_only
        else partial(full_runner, model)
    )
    runners = {name: make(two_batch_overlap=name) for name in ("off", "on")}
    steps = {
        name: gpu_steps(runner, args.tokens, prefill_only=args.prefill_only)
        for name, runner in runners.items()
    }
    auto = make(two_batch_overlap="auto", compile=False).report()
    if rank == 0:
        print(f"auto: {auto.overlap}", *auto.overlap_trials, sep="\n  ")
        print(f"{args.ranks} GPUs, {args.layers} layers of width {args.dim}; ms of a step")
        print("step                     off      on    gain")
    for name in steps["off"]:
        runs = [steps[kind][name] for kind in ("off", "on")]
        off, on = (run().float() for run in runs)
        error = ((on - off).norm() / off.norm()).item()
        assert error < 0.05, f"overlap changes logits by {error:.1e} of their norm"
        off_ms, on_ms = (milliseconds(run) for run in runs)
        if rank == 0:
            print(f"{name:20} {off_ms:7.2f} {on_ms:7.2f} {off_ms / on_ms:7.2f}", flush=True)
    for runner in runners.values():
        assert not runner.report().not_captured, runner.report().not_captured
    dist.barrier()
    os._exit(0)  # captured graphs hold collectives: to take the group down would wait for them


def prefill_runner(model: th.HybridModel, max_tokens: int, **options: Any) -> th.Runner:
    """Room for the prompts alone."""
    return th.Runner(
        model, max_seqs=NUM_SEQS, max_tokens=max_tokens, kv_tokens=2 * max_tokens, **options
    )


def full_runner(model: th.HybridModel, **options: Any) -> th.Runner:
    """A warm runner with room for all steps."""
    runner = th.Runner(
        model,
        max_seqs=DECODES[-1],
        max_tokens=PREFILLS[-1],
        kv_tokens=DECODES[-1] * (CONTEXT + 64),
        **options,
    )
    runner.warm_up()
    return runner


def prefill_step(runner: th.Runner, num_tokens: int, num_prompts: int = 4) -> Callable[[], Tensor]:
    """One step of fresh prompts, so many tokens together; it returns logits."""
    prompt = [7 * i % 251 for i in range(num_tokens // num_prompts)]

    def run() -> Tensor:
        seqs = runner.new_sequences(num_prompts)
        logits = runner.extend(seqs, [prompt] * num_prompts)
        runner.free(seqs)
        return logits

    return run


def make_context(runner: th.Runner) -> list[Sequence]:
    """As many sequences as decode at most, each with its context."""
    seqs = runner.new_sequences(DECODES[-1])
    prompt = [7 * i % 251 for i in range(CONTEXT)]
    for first in range(0, len(seqs), 8):
        runner.extend(seqs[first : first + 8], [prompt] * 8)
    return seqs


def decode_step(runner: th.Runner, seqs: list[Sequence], count: int) -> Callable[[], Tensor]:
    """One decode step of the first ``count`` of ``seqs``; it returns logits."""
    return lambda: runner.extend(seqs[:count], [[1]] * count)


def gpu_steps(
    runner: th.Runner, tokens: list[int], *, prefill_only: bool
) -> dict[str, Callable[[], Tensor]]:
    """By name."""
    prefills = {f"prefill {n} tokens": prefill_step(runner, n) for n in tokens}
    if prefill_only:
        return prefills
    context = cache(lambda: make_context(runner))  # once prefills need no sequences

    def decode(count: int) -> Tensor:
        return decode_step(runner, context(), count)()

    decodes = {f"decode {n} sequences": partial(decode, n) for n in DECODES}
    return prefills | decodes


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, help="default 256; on GPUs 4096")
    parser.add_argument("--tokens", type=int, nargs="+", help="default: four sizes")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prefill-only", action="store_true", help="on GPUs: no decode steps")
    parser.add_argument("--trace", action="store_true", help="draw the messages of a step")
    args = parser.parse_args()
    on_gpus = args.device == "cuda"
    args.dim = args.dim or (4096 if on_gpus else 256)
    args.tokens = args.tokens or (PREFILLS if on_gpus else [256, 512, 1024, 2048])
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        job = run_on_gpus if on_gpus else run
        torch.multiprocessing.spawn(job, args=(store, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
