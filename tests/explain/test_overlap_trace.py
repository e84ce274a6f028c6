"""Tracks of both halves, made from a trace and a schedule."""

from __future__ import annotations

from typing import Any

from expecttest import assert_expected_inline

from torch_hybrid.explain.overlap_trace import add_halves, half_events
from torch_hybrid.graphs.passes.schedule import Stage

SCHEDULE = (
    Stage(0, 0, ("linear", "all_reduce")),
    Stage(1, 0, ("linear", "all_reduce")),
    Stage(0, 1, ("wait_tensor", "paged_attention")),
    Stage(1, 1, ("wait_tensor", "paged_attention")),
)


def event(name: str, ts: float, dur: float, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}


def a_step(start: float, *, linear: bool = True) -> list[dict[str, Any]]:
    ops = [
        *([("torch_hybrid::linear", 1, 3)] if linear else []),
        ("_c10d_functional::all_reduce_", 5, 1),
        *([("torch_hybrid::linear", 7, 3)] if linear else []),
        ("_c10d_functional::all_reduce_", 11, 1),
        ("_c10d_functional::wait_tensor", 13, 1),
        ("torch_hybrid::paged_attention", 15, 4),
        ("_c10d_functional::wait_tensor", 20, 1),
        ("torch_hybrid::paged_attention", 22, 4),
        *([("torch_hybrid::linear", 27, 3)] if linear else []),  # the logits: of no half
    ]
    step = event("decode: 4 sequences", start, 40, "user_annotation")
    return [step, *(event(name, start + ts, dur) for name, ts, dur in ops)]


def drawn(events: list[dict[str, Any]]) -> str:
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    return "\n".join(
        f"{tracks[e['tid']]:<22}{e['ts']:>5} to {e['ts'] + e['dur']:<5} {e['name']}" for e in slices
    )


def test_stages_and_collectives_of_a_step():
    assert_expected_inline(
        drawn(half_events(a_step(100.0), [SCHEDULE])),
        """\
first half            101.0 to 106.0 a0: linear, all_reduce
second half           107.0 to 112.0 b0: linear, all_reduce
first half            113.0 to 119.0 a1: wait_tensor, paged_attention
second half           120.0 to 126.0 b1: wait_tensor, paged_attention
collectives in flight 105.0 to 114.0 all_reduce of a0
collectives in flight 111.0 to 121.0 all_reduce of b0""",
    )


def test_products_that_are_kernels_of_another_name_are_left_out():
    made = drawn(half_events(a_step(0.0, linear=False), [SCHEDULE]))
    assert "5.0 to 6.0   a0: linear, all_reduce" in made


def test_steps_of_another_graph_get_no_tracks():
    other = event("torch_hybrid::fused_experts", 101.0, 1.0)
    assert half_events([*a_step(100.0), other], [(Stage(0, 0, ("fused_experts",)),)]) == []
    assert half_events(a_step(0.0), []) == []


def test_the_rest_of_a_trace_is_kept():
    trace = {"traceEvents": a_step(0.0) + a_step(50.0), "displayTimeUnit": "ms"}
    added = add_halves(trace, [SCHEDULE])
    assert added["displayTimeUnit"] == "ms"
    assert added["traceEvents"][: len(trace["traceEvents"])] == trace["traceEvents"]
    assert sum(e.get("name") == "a0: linear, all_reduce" for e in added["traceEvents"]) == 2
