"""Time and memory of loading a checkpoint, beside transformers' own loader.

    python -m benchmarks.load [--model NAME] [--rounds N] [--folder PATH]

A random checkpoint of more than 2 GB in bfloat16 is written first, and loaded once by both to see
that they agree in every bit. Then fresh processes load it by turns: ours, transformers', and two of
ours that share the model on gloo. A process has imported all that it needs, transformers' code of
the model included, before it is looked at.

transformers maps weights that it need not convert, and reads those when they are first used; so
every process reads each of its weights once more, by a sum, and that counts. Memory is the peak of
RssAnon, read every few milliseconds, above what the process had before: pages of a file that is
mapped are the kernel's to take back. CPU time is of all threads. Files should be in memory
(``--folder /dev/shm``), or the disk is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_hybrid as th
from benchmarks.models import FAMILIES
from benchmarks.results import Results, Target, arguments, parse, title
from torch_hybrid.host.memory import zeros

# Over 2 GB in bfloat16; experts, which a checkpoint has one by one, or none.
LARGE = {
    "qwen3_next_moe": {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "vocab_size": 64_000,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_5": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "vocab_size": 64_000,
    },
}
QUICK = {"num_hidden_layers": 4, "hidden_size": 128, "vocab_size": 512}
LIMITS = {"time": 1.0, "alone": 1.05, "shared": 0.55}


@dataclass
class Usage:
    """What a part of a process took."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


@contextmanager
def watched() -> Iterator[Usage]:
    """Time, CPU time and the rise of anonymous memory while the body runs."""
    gc.collect()
    usage, before, stop = Usage(), _anonymous_bytes(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            usage.peak_bytes = max(usage.peak_bytes, _anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    start, cpu = time.perf_counter(), _cpu_seconds()
    try:
        yield usage
    finally:
        usage.seconds, usage.cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu
        stop.set()
        thread.join()


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def take_and_free(num_bytes: int) -> None:
    """Have the kernel hold so much free memory itself, in pages of any size."""
    zeros([num_bytes], dtype=torch.uint8, device=torch.device("cpu")).fill_(1)


def make_checkpoint(family: str, folder: Path, *, quick: bool) -> int:
    """Write random weights in several files; returns their bytes."""
    with torch.device("meta"):
        model = FAMILIES[family](QUICK if quick else LARGE[family]).to(torch.bfloat16)
    model.to_empty(device="cpu")
    noise = torch.randn(1 << 20).mul_(0.02).bfloat16()
    for weight in {*model.parameters(), *model.buffers()}:
        flat = weight.detach().view(-1)
        for part in flat.split(noise.numel()):
            part.copy_(noise[: part.numel()])
    model.save_pretrained(folder, max_shard_size="100KB" if quick else "500MB")
    return _bytes_of(folder)


def _bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _load_with_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def _load_together(folder: Path) -> Any:
    return th.from_pretrained(folder, ranks=dist.group.WORLD)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "transformers": _load_with_transformers,
    "ours": th.from_pretrained,
    "ours, each of two": _load_together,
}


def _child(loader: str, folder: Path) -> None:
    """Load, read every weight, and print what it took as JSON."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # its code is imported
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    take_and_free(3 * _bytes_of(folder) // 2)
    if "RANK" in os.environ:
        dist.barrier()
    with watched() as usage:
        model = LOADERS[loader](folder)
        loaded = time.perf_counter()
        for weight in model.parameters():
            weight.detach().sum()
    kept = sum(weight.nbytes for weight in set(model.parameters()))
    read_again = time.perf_counter() - loaded
    print(json.dumps({**vars(usage), "kept_bytes": kept, "read_again": read_again}))


def _check(folder: Path) -> None:
    """Both loaders give the same bits."""
    theirs, ours = th.adapt(_load_with_transformers(folder)), th.from_pretrained(folder)
    expected = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, expected.pop(name)), f"{name} differs"
    assert not expected


def _run(loader: str, folder: Path) -> list[dict[str, float]]:
    """What each process that loads together took."""
    command = [sys.executable, "-m", "benchmarks.load", "--child", loader, "--folder", str(folder)]
    num_ranks = 2 if loader == "ours, each of two" else 1
    environments: list[dict[str, str]] = [{}]
    if num_ranks > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "WORLD_SIZE": "2"}
        environments = [{**address, "RANK": str(rank)} for rank in range(num_ranks)]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for own in environments
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a process that loads by {loader!r} failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    """Write a checkpoint, check, load it by turns, print."""
    parser = arguments("Time and memory of loading a checkpoint.")
    parser.set_defaults(model="qwen3_next_moe", dtype="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written")
    parser.add_argument("--child", choices=[*LOADERS, "check"], help=argparse.SUPPRESS)
    options = parse(parser)
    if options.child:
        if options.child == "check":
            _check(options.folder)
        else:
            _child(options.child, options.folder)
        return
    if options.model not in LARGE:
        parser.error(f"--model must be one of {sorted(LARGE)}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = make_checkpoint(options.model, folder, quick=options.quick)
        check = [sys.executable, "-m", "benchmarks.load", "--child", "check", "--folder", name]
        subprocess.run(check, check=True, stderr=subprocess.DEVNULL)
        found = defaultdict(list)
        for _ in range(1 if options.quick else options.rounds):
            for loader in LOADERS:
                found[loader].append(_run(loader, folder))
    _report(options, size, found)


def _report(
    options: argparse.Namespace, size: int, found: dict[str, list[list[dict[str, float]]]]
) -> None:
    columns = [
        "",
        "s, best",
        "s, median",
        "of it reading again",
        "CPU s, best",
        "peak, MB",
        "of it",
    ]
    results = Results(title=title(options, f"Load, {size / 1e9:.3g} GB"), columns=columns)
    best, peaks = {}, {}
    for loader, runs in found.items():
        slowest = [max(run, key=lambda process: process["seconds"]) for run in runs]
        seconds = [process["seconds"] for process in slowest]
        highest = max(process["peak_bytes"] for run in runs for process in run)
        best[loader], peaks[loader] = min(seconds), highest
        results.add(
            loader,
            min(seconds),
            statistics.median(seconds),
            min(process["read_again"] for process in slowest),
            min(sum(process["cpu_seconds"] for process in run) for run in runs),
            highest / 1e6,
            f"{highest / runs[0][0]['kept_bytes']:.3f}x of what it keeps",
        )
    whole = found["ours"][0][0]["kept_bytes"]
    for name, measured, limit in (
        ("time over transformers'", best["ours"] / best["transformers"], LIMITS["time"]),
        ("anonymous memory over the weights", peaks["ours"] / whole, LIMITS["alone"]),
        ("the same of each of two", peaks["ours, each of two"] / whole, LIMITS["shared"]),
    ):
        results.targets.append(Target(name=name, measured=measured, limit=limit))
    results.emit(options)


if __name__ == "__main__":
    main()
