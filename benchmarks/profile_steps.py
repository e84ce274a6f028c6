"""Where the time of a compiled step goes: by op, in fused kernels, and on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

NUM_STEPS = 5
NUM_LINES = 12


def print_profile(name: str, run: Callable[[], Any]) -> None:
    """Profile a few steps and print milliseconds per step by what took them.

    "graph" is the compiled graph's own time: its fused kernels and the Python that calls them.
    "outside" is what comes before and after it: planning, refreshing, looking the graph up.
    """
    run()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            run()
        wall = (time.perf_counter() - start) / NUM_STEPS
    events = recorded.key_averages()
    in_graph = sum(e.cpu_time_total for e in events if "CompiledFxGraph" in e.key)
    lines = sorted(((e.self_cpu_time_total, e.count, _label(e.key)) for e in events), reverse=True)[
        :NUM_LINES
    ]
    lines.append((wall * 1e6 * NUM_STEPS - in_graph, NUM_STEPS, "outside"))
    print(f"profile of {name}: {wall * 1e3:.2f} ms per step (with the profiler's own cost)")
    for microseconds, count, label in lines:
        share = microseconds / NUM_STEPS / 1e3
        print(f"  {share:9.3f} ms  {count / NUM_STEPS:6.0f} calls  {label}")


def _label(key: str) -> str:
    return "graph: fused kernels and calls" if "CompiledFxGraph" in key else key[:90]
