"""Time to compile a step of training as layers grow: layers one by one, forward and backward.

    python -m benchmarks.training_compile_time [--model NAME] [--layers 8 16 48]

Each model is compiled in a fresh process with an empty cache. It takes two steps, over packings of
two numbers of tokens; the first makes a graph of each kind of layer, the second one for all sizes.
Gradients of a third step are compared with those of an uncompiled model. CPU seconds are those of
the process, which compiles in no other one: on a busy machine they say more than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from torch._dynamo.utils import counters

import torch_hybrid as th
from benchmarks.compile_time import cpu_seconds
from benchmarks.models import make_model
from benchmarks.results import Results, Target, arguments, parse, title
from tests.training.twins import flattened, furthest, grads, make_rows

_COLUMNS = ["layers", "CPU s", "wall s", "CPU s of step 1", "graphs", "uncompiled step, CPU s"]
_GROWTH = 1.2  # at most, from the fewest layers to the most
_LENGTHS = [70, 1, 3, 33], [20, 60], [5, 90]


def _child(options: argparse.Namespace) -> None:
    """Compile for one number of layers, check gradients, and print what it took as JSON."""
    torch.manual_seed(0)
    model = make_model(
        options.model, options.torch_dtype, quick=True, num_hidden_layers=options.child
    )
    twin = th.make_trainable(model).requires_grad_().train()
    batches = [flattened(make_rows(lengths)) for lengths in _LENGTHS]
    for batch in batches[:2]:  # builds what ops in C++ need
        twin(**batch).loss.backward()
    eager = cpu_seconds()
    plain = grads(twin, twin(**batches[2]).loss)
    eager = cpu_seconds() - eager
    twin.zero_grad()
    for layer in twin.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager" if options.quick else "inductor")
    wall, cpu = time.perf_counter(), [cpu_seconds()]
    for batch in batches[:2]:
        twin(**batch).loss.backward()
        cpu.append(cpu_seconds())
    wall = time.perf_counter() - wall
    with torch.compiler.set_stance("fail_on_recompile"):
        distance = furthest(grads(twin, twin(**batches[2]).loss), plain)
    if distance > 1e-3:
        raise SystemExit(f"gradients of the compiled layers are off by {distance}")
    graphs = counters["stats"]["unique_graphs"]
    print(json.dumps([cpu[2] - cpu[0], wall, cpu[1] - cpu[0], graphs, eager]))


def _run(options: argparse.Namespace, layers: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.training_compile_time", "--child", str(layers)]
    command += ["--model", options.model, "--dtype", options.dtype]
    command += ["--quick"] * options.quick
    if options.threads:
        command += ["--threads", str(options.threads)]
    with tempfile.TemporaryDirectory() as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(
            command, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True
        )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Start the processes, then print."""
    parser = arguments("Compile time of training as layers grow.")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 48])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parse(parser)
    if options.child:
        _child(options)
        return
    results = Results(title=title(options, "Compile time of training"), columns=_COLUMNS)
    all_layers = [4] if options.quick else options.layers
    cpu = {}
    for layers in all_layers:
        found = _run(options, layers)
        cpu[layers] = found[0]
        results.add(layers, *found)
    least, most = min(all_layers), max(all_layers)
    if most > least:
        name = f"CPU, {most} layers over {least}"
        results.targets.append(Target(name=name, measured=cpu[most] / cpu[least], limit=_GROWTH))
    results.emit(options)


if __name__ == "__main__":
    main()
