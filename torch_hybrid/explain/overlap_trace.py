"""Tracks of a timeline that show both halves of a step side by side.

A profiler sees ops, not halves. Ops run in the order of the graph's schedule, which tells the half
and the stage of each op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_hybrid.graphs.passes.schedule import Stage

Event = dict[str, Any]

_PID = 1_000_000  # a separate process in the viewer, below the real ones
_TRACKS = ("first half", "second half", "collectives in flight")
_PREFIXES = ("torch_hybrid::", "_c10d_functional::")


def half_events(events: Sequence[Event], schedules: Iterable[Sequence[Stage]]) -> list[Event]:
    """Make the events that a Chrome trace lacks: a track for each half, and one for collectives.

    Args:
        events: events of the trace. Each step is a user annotation around its ops.
        schedules: schedules of the graphs that may have run; other steps get no tracks.

    Returns:
        A slice for each stage of each step, from its first op to the end of its last, and one for
        each collective, from its start to the end of its wait.
    """
    ops = sorted((e for e in events if _is_op(e)), key=lambda event: float(event["ts"]))
    known = [stages for stages in schedules if stages]
    made: list[Event] = []
    for step in (e for e in events if e.get("cat") == "user_annotation"):
        inside = [op for op in ops if step["ts"] <= op["ts"] < step["ts"] + step["dur"]]
        for stages in known:
            placed = _placed(inside, stages)
            if placed:
                made += [*_stage_slices(placed), *_collectives_in_flight(placed)]
                break
    return [*_track_names(), *made] if made else []


def _is_op(event: Event) -> bool:
    return event.get("ph") == "X" and str(event.get("name")).startswith(_PREFIXES)


def _op_name(event: Event) -> str:
    return str(event["name"]).partition("::")[2].rstrip("_")


def _placed(ops: Sequence[Event], stages: Sequence[Stage]) -> list[tuple[Stage, Event]]:
    """Match each op of a step to its stage; return nothing if the ops are not the schedule's."""
    seen = {_op_name(op) for op in ops}  # a GEMM in a fused kernel has no event
    planned = [(stage, op) for stage in stages for op in stage.ops if op in seen]
    names = [name for _, name in planned]
    if not names or [_op_name(op) for op in ops[: len(names)]] != names:
        return []
    return [(stage, op) for (stage, _), op in zip(planned, ops, strict=False)]


def _stage_slices(placed: Sequence[tuple[Stage, Event]]) -> list[Event]:
    spans: dict[Stage, list[Event]] = {}
    for stage, op in placed:
        spans.setdefault(stage, []).append(op)
    return [
        _slice(stage.half, f"{stage.name}: {stage.work}", ops[0], ops[-1])
        for stage, ops in spans.items()
    ]


def _collectives_in_flight(placed: Sequence[tuple[Stage, Event]]) -> list[Event]:
    """Make a slice for each collective, from its start to the end of its wait in that half."""
    started: dict[int, list[tuple[Stage, Event]]] = {0: [], 1: []}
    slices = []
    for stage, op in placed:
        if not str(op["name"]).startswith("_c10d_functional::"):
            continue
        if _op_name(op) != "wait_tensor":
            started[stage.half].append((stage, op))
        elif started[stage.half]:
            begun, start = started[stage.half].pop(0)
            slices.append(_slice(2, f"{_op_name(start)} of {begun.name}", start, op))
    return slices


def _slice(track: int, name: str, first: Event, last: Event) -> Event:
    end = float(last["ts"]) + float(last["dur"])
    start = float(first["ts"])
    return {"ph": "X", "pid": _PID, "tid": track, "name": name, "ts": start, "dur": end - start}


def _track_names() -> list[Event]:
    def named(kind: str, name: str, **place: int) -> Event:
        return {"ph": "M", "pid": _PID, "name": kind, "args": {"name": name}, **place}

    return [
        named("process_name", "two-batch overlap"),
        *(named("thread_name", name, tid=track) for track, name in enumerate(_TRACKS)),
    ]


def add_halves(trace: Mapping[str, Any], schedules: Iterable[Sequence[Stage]]) -> dict[str, Any]:
    """Add the tracks of ``half_events`` to a Chrome trace."""
    events = list(trace["traceEvents"])
    return {**trace, "traceEvents": [*events, *half_events(events, schedules)]}
