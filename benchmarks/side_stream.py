"""Two halves on one GPU: mixers of one on a second stream, beside the matrix products of the other.

    python -m benchmarks.side_stream [--model NAME] [--hidden 2048] [--layers 8]

Needs a CUDA device. The steps are captured in CUDA graphs and compared: whole, in halves on one
stream, and in halves on two; as a user sees them, from lists of tokens to logits on the device, and
by the time in which any kernel ran. ``beside`` is the time of all kernels together over that: above
1, kernels ran beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cuda_graphs import milliseconds
from benchmarks.models import make_model
from benchmarks.results import Results, arguments, parse, title
from torch_hybrid import HybridModel, Runner, adapt
from torch_hybrid.caches.sequence import Sequence
from torch_hybrid.graphs.passes import DEFAULT_PASSES, without

PREFILLS = (1024, 2048, 4096, 8192)  # tokens of a step
PROMPTS = (1, 4)  # that share them
DECODES = (64, 128, 256, 512)  # sequences
CONTEXT = 1024  # tokens of each sequence that decodes
ONE_STREAM = without(DEFAULT_PASSES, ["mixers_on_side_stream"])
CONTESTANTS = {
    "whole": {"two_batch_overlap": "off"},
    "one stream": {"two_batch_overlap": "on", "passes": ONE_STREAM},
    "two streams": {"two_batch_overlap": "on"},
}
KERNEL_COLUMNS = ("whole, kernels", "one, kernels", "two, kernels", "whole / two")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Milliseconds in which any ran, and the time of all together over that."""

    busy_ms: float
    beside: float


def make_runner(model: HybridModel, **options: object) -> Runner:
    """A warm runner with room for the steps below."""
    runner = Runner(
        model,
        max_seqs=DECODES[-1],
        max_tokens=PREFILLS[-1],
        kv_tokens=DECODES[-1] * (CONTEXT + 64),
        **options,  # type: ignore[arg-type]
    )
    runner.warm_up()
    return runner


def prefill(runner: Runner, num_tokens: int, num_prompts: int = 4) -> Callable[[], Tensor]:
    """One step of fresh prompts, so many tokens together; it returns logits."""
    prompt = [7 * i % 251 for i in range(num_tokens // num_prompts)]

    def run() -> Tensor:
        seqs = runner.new_sequences(num_prompts)
        logits = runner.extend(seqs, [prompt] * num_prompts)
        runner.free(seqs)
        return logits

    return run


def make_context(runner: Runner) -> list[Sequence]:
    """As many sequences as decode at most, each with its context."""
    seqs = runner.new_sequences(DECODES[-1])
    prompt = [7 * i % 251 for i in range(CONTEXT)]
    for first in range(0, len(seqs), 8):
        runner.extend(seqs[first : first + 8], [prompt] * 8)
    return seqs


def decode(runner: Runner, seqs: Many[Sequence], count: int) -> Callable[[], Tensor]:
    """One decode step of the first ``count`` of ``seqs``; it returns logits."""
    return lambda: runner.extend(seqs[:count], [[1]] * count)


def kernels(run: Callable[[], object]) -> Kernels:
    """The kernels of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    )
    busy, last = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return Kernels(busy / 1e3, sum(end - start for start, end in spans) / busy)


def measure(model: HybridModel, choice: Mapping[str, Any]) -> dict[str, tuple[float, Kernels]]:
    """Milliseconds of each step as a user sees it, and its kernels."""
    runner = make_runner(model, **choice)
    steps: dict[str, Callable[[], object]] = {
        f"prefill {num_prompts} x {n // num_prompts}": prefill(runner, n, num_prompts)
        for num_prompts in PROMPTS
        for n in PREFILLS
    }
    found = {name: (milliseconds(run), kernels(run)) for name, run in steps.items()}
    seqs = make_context(runner)
    for count in DECODES:
        run = decode(runner, seqs, count)
        found[f"decode {count}"] = milliseconds(run), kernels(run)
    assert not runner.report().not_captured, runner.report().not_captured
    return found


def main() -> None:
    """Print a line for each step."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    options = parse(parser)
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "max_position_embeddings": 2 * PREFILLS[-1],
    }
    model = adapt(make_model(options.model, options.torch_dtype, device="cuda", **sizes))
    found = {name: measure(model, choice) for name, choice in CONTESTANTS.items()}
    results = Results(
        title=title(options, "Two halves on one GPU"),
        columns=("step", *(f"{name} ms" for name in CONTESTANTS), *KERNEL_COLUMNS, "beside"),
    )
    for step, (_, on_two) in found["two streams"].items():
        seen = [of[step][0] for of in found.values()]
        busy = [of[step][1].busy_ms for of in found.values()]
        results.add(step, *seen, *busy, busy[0] / busy[-1], on_two.beside)
    results.emit(options)


if __name__ == "__main__":
    main()
