"""Tables about a runner: its layers, weights, implementations, graphs, pools and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from torch_hybrid.caches.room import byte_count, free_bytes
from torch_hybrid.caches.sizes import PoolCost
from torch_hybrid.explain.weights import weights_by_part
from torch_hybrid.graphs.options.measure_overlap import Trial
from torch_hybrid.graphs.report import Report
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.specs import LayerEntry, LayerSpec, LayerTable, PreviousHiddenSpec


@dataclass(frozen=True, slots=True)
class Section:
    """A table with a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def explain(runner: Runner) -> list[Section]:
    """List all tables that are known before serving.

    The table of graphs has those compiled so far: call ``runner.warm_up()`` first.
    """
    model = runner.model
    sections = [layers(runner), weights(model), implementations(runner)]
    sections += [pools(runner), memory(runner)]
    if runner.compile:
        sections.append(graphs(runner.report()))
    trials = runner.report().overlap_trials
    return [*sections, halves(trials)] if trials else sections


def layers(runner: Runner) -> Section:
    """Make the layer table: equal layers share a row, with their bytes in the pools."""
    rows = []
    for (kind, spec, cost), ids in _equal_mixers(runner).items():
        rows.append(
            (
                _ranges(ids),
                kind,
                ", ".join(_facts(spec)),
                byte_count(cost.per_token) if cost.per_token else "-",
                byte_count(cost.per_sequence) if cost.per_sequence else "-",
            )
        )
    return Section(
        f"{len(runner.cache.table)} layers",
        ("layers", "kind", "facts", "per token", "per sequence"),
        tuple(rows),
    )


def weights(model: Any) -> Section:
    """Make the table of a model's weights by part and format, the largest first."""
    parts = weights_by_part(model)
    rows = [
        (
            part,
            _ranges(sorted(stored.layers)) or "-",
            form,
            byte_count(stored.num_bytes),
            byte_count(stored.scale_bytes) if stored.scale_bytes else "-",
        )
        for (part, form), stored in sorted(parts.items(), key=lambda item: -item[1].num_bytes)
    ]
    total = sum(stored.num_bytes + stored.scale_bytes for stored in parts.values())
    return Section(
        f"Weights of {byte_count(total)}",
        ("part", "layers", "stored as", "numbers", "scales"),
        tuple(rows),
    )


def implementations(runner: Runner) -> Section:
    """Make the table of implementations: the chosen one of each op, and why not the others."""
    chosen = [
        (mode.name, choice)
        for backend in runner.backends.values()
        for mode, choices in backend.choices.items()
        for choice in choices
    ]
    rows = []
    for step, choice in [*chosen, *(("every", choice) for choice in runner.choices)]:
        refused = [f"{name}: {'; '.join(why)}" for name, why in choice.refused.items()]
        takes = f"{choice.impl}\n{choice.measured}" if choice.measured else choice.impl
        rows.append((step, choice.op, takes, "\n".join(refused) or "-"))
    return Section("Implementations", ("step", "op", "takes", "and not"), tuple(rows))


def graphs(report: Report) -> Section:
    """Make the table of compiled graphs and their ops; breaks, recompiles and clones must be 0."""
    rows = [
        (
            name,
            "loaded" if graph.is_loaded else f"{graph.seconds:.1f} s",
            f"{graph.num_nodes} nodes\n{graph.layers.traced} layers\n{graph.layers.copied} copied\n"
            f"{len(graph.regions)} regions\n{sum(graph.regions)} calls",
            "\n".join(f"{count} x {op}" for op, count in sorted(graph.ops.items())),
            str(len(graph.pool_clones)),
        )
        for name, graph in report.graphs.items()
    ]
    title = (
        f"{len(report.graphs)} graphs, {report.graph_breaks} breaks, "
        f"{report.recompiles} recompiles, {len(report.pool_clones)} pool clones"
    )
    refused = {graph.layers.why_not_copied for graph in report.graphs.values()} - {""}
    title = "\n".join([title, *(f"no layer is copied: {why}" for why in sorted(refused))])
    columns = ("step", "compiled in", "graph", "ops", "pool clones")
    return Section(title, columns, tuple(rows))


def halves(trials: tuple[Trial, ...]) -> Section:
    """Make the table of overlap "auto": the times that it measured, and the steps that it cuts."""
    rows = [
        (
            str(trial.num_tokens),
            f"{1e3 * trial.whole:.2f} ms",
            f"{1e3 * trial.halves:.2f} ms",
            "cut from here on" if trial.pays else "whole",
        )
        for trial in trials
    ]
    return Section(
        "Products and messages of a few layers, whole and in halves",
        ("tokens", "whole", "halves", "prefills are"),
        tuple(rows),
    )


def passes(report: Report) -> Section:
    """Make the table of graph passes: the nodes of each graph before and after each."""
    rows = [
        (name, record.name, str(record.nodes_before), str(record.nodes_after))
        for name, graph in report.graphs.items()
        for record in graph.passes
    ]
    return Section("Graph passes", ("step", "pass", "nodes before", "after"), tuple(rows))


def schedules(report: Report) -> list[Section]:
    """Make a table of each graph that runs in halves: its stages in order, a column per half."""
    return [
        Section(
            f"Schedule of {name}",
            ("stage", "first half", "second half"),
            tuple(
                (stage.name, *(stage.work if stage.half == half else "" for half in (0, 1)))
                for stage in graph.schedule
            ),
        )
        for name, graph in report.graphs.items()
        if graph.schedule
    ]


def pass_diffs(report: Report, name: str) -> dict[str, str]:
    """Compare each graph before and after a pass that keeps texts (``passes.with_text``).

    Returns:
        The changed lines by the kind of step.
    """
    return {
        step: record.diff()
        for step, graph in report.graphs.items()
        for record in graph.passes
        if record.name == name
    }


def pools(runner: Runner) -> Section:
    """Make the table of the pools: bytes of a token, a sequence and a snapshot, and their room."""
    costs = runner.cache.costs()
    per_token = sum(cost.per_token for cost in costs)
    per_sequence = sum(cost.per_sequence for cost in costs)
    pool_bytes = sum(pool.nbytes for pool in runner.cache.pool_tensors())
    # The column "in all" includes the null page and the null slot, which nobody owns.
    num_tokens, num_slots = runner.max_seq_len + runner.page_size, runner.max_seqs + 1
    rows = [
        _cost("token", per_token, runner.max_seq_len, num_tokens),
        _cost("sequence", per_sequence, runner.max_seqs, num_slots),
    ]
    if num_kept := runner.cache.sizes.num_snapshots:
        rows.append(_cost("snapshot", per_sequence, num_kept, num_kept))
    return Section(
        f"Pools of {byte_count(pool_bytes)}", ("", "bytes each", "room for", "in all"), tuple(rows)
    )


def _cost(what: str, each: int, room: int, held: int) -> tuple[str, ...]:
    return what, byte_count(each), f"{room:,}", byte_count(held * each)


def memory(runner: Runner) -> Section:
    """Make the table of the runner's device: the bytes of each use, and the free bytes."""
    report = runner.report()
    device = runner.model.device
    weights = _weight_bytes(runner.model, device)
    rows = [(f"weights, {str(dtype).removeprefix('torch.')}", n) for dtype, n in weights.items()]
    rows += [("pools", report.pool_bytes), ("inputs of steps", report.static_input_bytes)]
    if report.captured_graphs:
        rows.append((f"{len(report.captured_graphs)} captured graphs", report.captured_bytes))
    if (free := free_bytes(device)) is not None:
        rows.append(("free", free))
    shown = [(what, byte_count(num_bytes)) for what, num_bytes in rows]
    if runner.kv_room is not None:
        shown.append((f"kv_tokens auto: {runner.kv_room.num_tokens:,}", str(runner.kv_room)))
    return Section(f"Memory on {device}", ("what", "bytes"), tuple(shown))


def _weight_bytes(model: Any, device: torch.device) -> dict[torch.dtype, int]:
    """Sum the bytes of the weights on a device by dtype; a tied weight counts once."""
    found: Counter[torch.dtype] = Counter()
    for weight in {*model.parameters(), *model.buffers()}:
        if weight.device == device:
            found[weight.dtype] += weight.nbytes
    return dict(found.most_common())


def pattern(table: LayerTable) -> str:
    """Write a letter for each layer: F full attention, L linear attention, B both, - none."""
    letters = {"full": "F", "linear": "L"}

    def letter(layer: Sequence[LayerEntry]) -> str:
        mixers = [entry for entry in layer if entry.kind != PreviousHiddenSpec.kind]
        found = {letters[entry.spec.family] for entry in mixers}
        return "B" if len(found) > 1 else found.pop() if found else "-"

    return "".join(map(letter, table.layers))


def _equal_mixers(runner: Runner) -> dict[tuple[str, LayerSpec, PoolCost], list[int]]:
    """Group the layers by their kind of mixer, its spec and its cost."""
    groups: dict[tuple[str, LayerSpec, PoolCost], list[int]] = {}
    costs = iter(runner.cache.costs())
    for layer_id, layer in enumerate(runner.cache.table.layers):
        for entry in layer:
            groups.setdefault((entry.kind, entry.spec, next(costs)), []).append(layer_id)
    return groups


def _ranges(ids: Sequence[int]) -> str:
    """Write layer ids as ranges: [0, 1, 2, 4] -> "0-2, 4"."""
    runs: list[list[int]] = []
    for layer_id in ids:
        if runs and runs[-1][1] == layer_id - 1:
            runs[-1][1] = layer_id
        else:
            runs.append([layer_id, layer_id])
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def _facts(spec: LayerSpec) -> list[str]:
    """List the fields of a spec that are not at their defaults."""
    named = [
        (field.name.removeprefix("num_"), value)
        for field in fields(spec)
        if (value := getattr(spec, field.name)) != field.default
    ]
    return [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in named
    ]
