"""Time to compile all steps of a runner as layers grow: cold, and warm from the compile cache.

    python -m benchmarks.compile_time [--model NAME] [--layers 8 24 48]

Each runner is made in a fresh process. The second one of a size finds the cache folder that the
first one left, as a server finds it at its next start.
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

from benchmarks.models import make_model
from benchmarks.oracle import Oracle
from benchmarks.results import Results, arguments, parse, title


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _child(options: argparse.Namespace) -> None:
    """Compile for one number of layers, check the logits, and print what it took as JSON."""
    from torch_hybrid import Runner, adapt

    hf_model = make_model(
        options.model, options.torch_dtype, quick=True, num_hidden_layers=options.child
    )
    runner = Runner(adapt(copy.deepcopy(hf_model)), max_seqs=4, max_tokens=256, kv_tokens=1024)
    wall, cpu = time.perf_counter(), _cpu_seconds()
    runner.warm_up()
    wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    prompts = [list(range(50)), list(range(70, 100))]
    logits = runner.extend(runner.new_sequences(2), prompts)
    Oracle(hf_model).check(f"{options.child} layers", logits, prompts)
    report = runner.report()
    found = {"wall": wall, "cpu": cpu, "graphs": report.compiles, "recompiles": report.recompiles}
    print(json.dumps(found))


def _run(options: argparse.Namespace, layers: int, cache: str) -> dict[str, float]:
    """One fresh process; what its last line says."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--child", str(layers)]
    command += ["--model", options.model, "--dtype", options.dtype]
    if options.threads:
        command += ["--threads", str(options.threads)]
    done = subprocess.run(
        command,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the run with {layers} layers failed: {done.stdout}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Start the processes, then print."""
    parser = arguments("Compile time as layers grow, cold and warm.")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 24, 48])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parse(parser)
    if options.child:
        _child(options)
        return
    results = Results(
        title=title(options, "Compile time, hidden size 128"),
        columns=["layers", "cache", "wall s", "CPU s", "graphs", "recompiles"],
    )
    for layers in [4] if options.quick else options.layers:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                found = _run(options, layers, cache)
                counts = found["graphs"], found["recompiles"]
                results.add(layers, state, found["wall"], found["cpu"], *counts)
    results.emit(options)


if __name__ == "__main__":
    main()
