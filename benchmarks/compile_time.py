"""Time to compile all steps of a runner as layers grow: cold, warm from the compile cache, and not
at all, from an artefact.

    python -m benchmarks.compile_time [--model NAME] [--layers 8 24 48] [--overlap off on]

Each runner is made in a fresh process, and no steps are kept. The second one of a size finds the
folder of torch's caches that the first one left; the third one has the artefact that the second one
saved, and an empty folder. The first token is counted from when the weights are there. CPU seconds
are those of the process and of the compilers that it starts: on a busy machine they say more than
wall time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from typing import Any

from benchmarks.models import make_model
from benchmarks.oracle import Oracle
from benchmarks.results import Results, Target, arguments, parse, title

_COLUMNS = ["layers", "overlap", "from", "wall s", "CPU s", "first token s", "graphs"]
_COLUMNS += ["recompiles", "layers copied", "regions"]
_FOUND = ["wall", "cpu", "first token", "graphs", "recompiles", "copied", "regions"]
_FIRST_TOKEN = 6.0  # seconds, from an artefact
_GROWTH = {"cold": 1.15, "warm": 1.4}  # at most, from the fewest layers to the most


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _child(options: argparse.Namespace) -> None:
    """Compile for one number of layers, check the logits, and print what it took as JSON."""
    from torch_hybrid import Runner, adapt

    hf_model = make_model(
        options.model, options.torch_dtype, quick=True, num_hidden_layers=options.child
    )
    model = adapt(copy.deepcopy(hf_model))
    prompts = [list(range(50)), list(range(70, 100))]
    start = time.perf_counter()
    runner = Runner(
        model,
        max_seqs=4,
        max_tokens=256,
        kv_tokens=1024,
        two_batch_overlap=options.overlap[0],
        artefact=options.artefact,
    )
    wall, cpu = time.perf_counter(), cpu_seconds()
    runner.warm_up()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    logits = runner.extend(runner.new_sequences(2), prompts)
    first_token = time.perf_counter() - start
    if options.save:
        runner.save(options.save)
    Oracle(hf_model).check(f"{options.child} layers", logits, prompts)
    report = runner.report()
    found = {
        "wall": wall,
        "cpu": cpu,
        "first token": first_token,
        "graphs": report.compiles,
        "recompiles": report.recompiles,
        "copied": [graph.layers.copied for graph in report.graphs.values()],
        "regions": [len(graph.regions) for graph in report.graphs.values()],
    }
    print(json.dumps(found))


def _run(
    options: argparse.Namespace, layers: int, overlap: str, cache: str, *further: str
) -> dict[str, Any]:
    """One fresh process; what its last line says."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--child", str(layers)]
    command += ["--model", options.model, "--dtype", options.dtype, "--overlap", overlap, *further]
    if options.threads:
        command += ["--threads", str(options.threads)]
    done = subprocess.run(
        command,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCH_HYBRID_STEP_CACHE": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the run with {layers} layers failed: {done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Start the processes, then print."""
    parser = arguments("Compile time as layers grow, cold and warm.")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 24, 48])
    parser.add_argument("--overlap", nargs="+", choices=["off", "on"], default=["off"])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--artefact", help=argparse.SUPPRESS)
    options = parse(parser)
    if options.child:
        _child(options)
        return
    results = Results(
        title=title(options, "Compile time, hidden size 128"),
        columns=_COLUMNS,
    )
    all_layers = [4] if options.quick else options.layers
    cpu: dict[tuple[str, int, str], float] = {}
    first_token: dict[tuple[str, int, str], float] = {}
    for overlap, layers in product(options.overlap, all_layers):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as empty:
            steps = f"{empty}/steps"
            for state, folder, further in (
                ("cold", cache, ()),
                ("warm", cache, ("--save", steps)),
                ("artefact", empty, ("--artefact", steps)),
            ):
                found = _run(options, layers, overlap, folder, *further)
                cpu[overlap, layers, state] = found["cpu"]
                first_token[overlap, layers, state] = found["first token"]
                results.add(layers, overlap, state, *(found[name] for name in _FOUND))
    least, most = min(all_layers), max(all_layers)
    for overlap, (state, limit) in product(options.overlap, _GROWTH.items()):
        if most > least:
            name = f"CPU, {state}, overlap {overlap}, {most} layers over {least}"
            ratio = cpu[overlap, most, state] / cpu[overlap, least, state]
            results.targets.append(Target(name=name, measured=ratio, limit=limit))
    for overlap, layers in product(options.overlap, all_layers):
        name = f"first token from an artefact, {layers} layers, overlap {overlap}, s"
        measured = first_token[overlap, layers, "artefact"]
        results.targets.append(Target(name=name, measured=measured, limit=_FIRST_TOKEN))
    if len(options.overlap) > 1:
        for layers, state in product(all_layers, _GROWTH):
            name = f"CPU, {state}, {layers} layers, overlap on over off"
            ratio = cpu["on", layers, state] / cpu["off", layers, state]
            results.targets.append(Target(name=name, measured=ratio, limit=2.0))
    results.emit(options)


if __name__ == "__main__":
    main()
