"""Where the time of a compiled step goes: by op, in the graph's own code, and outside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

NUM_STEPS = 8
NUM_LINES = 12

Calls = dict[tuple[str, int], float]  # label and how manieth call: microseconds of its own


def print_profile(name: str, run: Callable[[], Any]) -> None:
    """Profile some steps and print what each op takes.

    Each call counts with the fastest of its steps, so that what else the machine does stays out.
    "graph" is the compiled graph's own time: its fused kernels and the Python that calls them and
    the ops. What is not torch's (planning, bookkeeping) is not seen here: see benchmarks.overhead.
    """
    run()
    steps = [_one_step(run) for _ in range(NUM_STEPS)]
    fastest = {call: min(step.get(call, 0.0) for step in steps) for call in steps[0]}
    spent: Counter[str] = Counter()
    for (label, _), microseconds in fastest.items():
        spent[label] += microseconds
    counts = Counter(label for label, _ in fastest)
    print(f"profile of {name}, of {sum(spent.values()) / 1e3:.2f} ms:")
    for label, microseconds in spent.most_common(NUM_LINES):
        print(f"  {microseconds / 1e3:9.3f} ms  {counts[label]:5} calls  {label}")


def _one_step(run: Callable[[], Any]) -> Calls:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    calls: Calls = {}
    seen: Counter[str] = Counter()
    for event in recorded.events():
        label = "graph: fused kernels and calls" if "CompiledFxGraph" in event.name else event.name
        calls[label, seen[label]] = event.self_cpu_time_total
        seen[label] += 1
    return calls
