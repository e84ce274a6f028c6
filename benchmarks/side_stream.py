"""Two halves on one GPU: mixers of one on a second stream, beside the matrix products of the other.

    python -m benchmarks.side_stream [--model NAME] [--hidden 2048] [--layers 8]

Needs a CUDA device. The steps are captured in CUDA graphs and compared: whole, in halves on one
stream, and in halves on two. ``beside`` is the time of all kernels together over the time in which
any ran: above 1, kernels ran beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cuda_graphs import milliseconds
from benchmarks.models import make_model
from benchmarks.results import Results, arguments, parse, title
from torch_hybrid import HybridModel, Runner, adapt
from torch_hybrid.caches.hybrid import Sequence

PREFILLS = (1024, 2048, 4096, 8192)  # tokens, of four prompts
DECODES = (64, 128, 256, 512)  # sequences
CONTEXT = 1024  # tokens of each sequence that decodes
CONTESTANTS = {
    "whole": {"two_batch_overlap": "off"},
    "one stream": {"two_batch_overlap": "on", "switched_off": ["mixers_on_side_stream"]},
    "two streams": {"two_batch_overlap": "on"},
}


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


def prefill(runner: Runner, num_tokens: int) -> Callable[[], object]:
    """One step of four fresh prompts."""

    def run() -> None:
        seqs = runner.new_sequences(4)
        runner.extend(seqs, [[1] * (num_tokens // 4)] * 4)
        runner.free(seqs)

    return run


def decode(runner: Runner, seqs: Many[Sequence], count: int) -> Callable[[], object]:
    """One decode step of the first ``count`` of ``seqs``."""
    return lambda: runner.extend(seqs[:count], [[1]] * count)


def beside(run: Callable[[], object]) -> float:
    """Time of all kernels of a step over the time in which any of them ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type is torch.autograd.DeviceType.CUDA
    )
    busy, last = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return sum(end - start for start, end in spans) / busy


def measure(model: HybridModel, choice: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Milliseconds and ``beside`` of each step."""
    runner = make_runner(model, **choice)
    steps = {f"prefill {n} tokens": prefill(runner, n) for n in PREFILLS}
    found = {name: (milliseconds(run), beside(run)) for name, run in steps.items()}
    seqs = runner.new_sequences(DECODES[-1])
    for first in range(0, len(seqs), 8):
        runner.extend(seqs[first : first + 8], [[1] * CONTEXT] * 8)
    for count in DECODES:
        run = decode(runner, seqs, count)
        found[f"decode {count} sequences"] = milliseconds(run), beside(run)
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
    model = adapt(make_model(options.model, options.torch_dtype, **sizes).cuda())
    times = {name: measure(model, choice) for name, choice in CONTESTANTS.items()}
    results = Results(
        title=title(options, "Two halves on one GPU"),
        columns=("step", "whole ms", "one stream", "two streams", "whole / two", "beside"),
    )
    for step, (_, together) in times["two streams"].items():
        whole, one, two = (times[name][step][0] for name in CONTESTANTS)
        results.add(step, whole, one, two, whole / two, together)
    results.emit(options)


if __name__ == "__main__":
    main()
