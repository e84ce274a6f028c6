"""Steps captured in CUDA graphs against the same compiled steps launched one kernel after another.

    python -m benchmarks.cuda_graphs [--model NAME] [--dtype NAME] [--profile]

Needs a CUDA device. Each step is timed as a user sees it: from lists of tokens on the host to
logits on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.steps import kernels_of
from benchmarks.models import make_model
from benchmarks.results import Results, arguments, parse, title
from torch_hybrid import HybridModel, Runner, adapt

SEQS, TOKENS = 64, 2048


def make_runner(model: HybridModel, **options: str) -> Runner:
    """A warm runner with room for the steps below."""
    runner = Runner(model, max_seqs=SEQS, max_tokens=TOKENS, kv_tokens=SEQS * 512, **options)
    runner.warm_up()
    return runner


def decode(runner: Runner, count: int) -> Callable[[], object]:
    """One decode step of so many sequences, each with 128 tokens."""
    seqs = runner.new_sequences(count)
    for seq in seqs:
        runner.extend([seq], [[1] * 128])
    return lambda: runner.extend(seqs, [[1]] * count)


def prefill(runner: Runner, count: int) -> Callable[[], object]:
    """One step of so many fresh prompts that fill it."""

    def run() -> None:
        seqs = runner.new_sequences(count)
        runner.extend(seqs, [[1] * (TOKENS // count)] * count)
        runner.free(seqs)

    return run


def milliseconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Of the fastest of several runs, the device's work included."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def print_kernels(name: str, run: Callable[[], object]) -> None:
    """Print how long the kernels of a captured step run, by what they do."""
    run()
    found = min((kernels_of(run) for _ in range(3)), key=lambda kernels: kernels.busy_ms)
    groups = (f"{group} {took:.0f} us ({n})" for group, (took, n) in found.groups.items())
    count = sum(n for _, n in found.groups.values())
    print(f"{name}: {found.busy_ms:.3f} ms in {count} kernels: {', '.join(groups)}")


def main() -> None:
    """Print a line for each step."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--profile", action="store_true", help="print what kernels take")
    options = parse(parser)
    hf_model = make_model(options.model, options.torch_dtype, quick=options.quick)
    model = adapt(hf_model.cuda())
    runners = {name: make_runner(model, cuda_graphs=name) for name in ("off", "auto")}
    steps = {
        "decode of 1": lambda runner: decode(runner, 1),
        "decode of 8": lambda runner: decode(runner, 8),
        "decode of 32": lambda runner: decode(runner, 32),
        "prefill of 1 x 2048": lambda runner: prefill(runner, 1),
        "prefill of 16 x 128": lambda runner: prefill(runner, 16),
    }
    results = Results(
        title=title(options, "Captured steps"),
        columns=("step", "launched ms", "captured ms", "ratio"),
    )
    for name, make in steps.items():
        times = {}
        for kind, runner in runners.items():
            times[kind] = milliseconds(make(runner))
        results.add(name, times["off"], times["auto"], times["off"] / times["auto"])
        if options.profile:
            print_kernels(name, make(runners["auto"]))
    report = runners["auto"].report()
    results.notes.append(f"captured: {'; '.join(report.captured_graphs)}")
    results.notes.append(f"{report.captured_bytes / 2**20:.0f} MiB for all of them")
    results.notes += [f"not captured: {k}: {v}" for k, v in report.not_captured.items()]
    results.emit(options)


if __name__ == "__main__":
    main()
