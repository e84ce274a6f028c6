"""Peak resident set of a serving process, against what it has to hold.

    python -m benchmarks.memory [--model NAME] [--dtype NAME]

A fresh process loads a checkpoint, compiles, and serves requests; the kernel's own high-water mark
is reset after compiling and read after serving. It has to hold the weights, the pools, and the
largest set of activations that is alive at once: for a step of ``max_tokens`` tokens, the residual
stream twice (before and after a block) with the widest block's inner tensors (an MLP's gate, up and
their product; a mixer's projections, their convolution and its output), and the logits of
``max_seqs`` sequences in float32. The interpreter with torch, transformers and the compiler is
there before any model is, and is shown apart: for a small model it is a large part.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.mixers import inner_width
from benchmarks.models import make_model
from benchmarks.oracle import Oracle
from benchmarks.results import Results, Target, arguments, parse, title
from benchmarks.serve import make_prompts, serve
from torch_hybrid import Runner, from_pretrained
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.serving.engine import Engine

LIMIT = 1.15
MB = 1e6


def resident(field: str) -> float:
    """Bytes of this process: VmRSS now, or VmHWM at most since the last reset."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024.0


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def largest_activations(model: HybridModel, *, max_tokens: int, max_seqs: int) -> float:
    """Bytes, as the module says."""
    config = model.hf_model.config.get_text_config()
    mlp = 3 * config.intermediate_size
    mixers = max(inner_width(entry.spec) for entry in model.table.entries)
    widths = 2 * config.hidden_size + max(mlp, mixers)
    return max_tokens * widths * model.dtype.itemsize + max_seqs * model.vocab_size * 4


def _load_libraries(family: str) -> None:
    """Import what every serving process has: transformers' code of the model, and the compiler."""
    make_model(family, quick=True)
    torch.compile(torch.relu)(torch.ones(100))
    gc.collect()


def _child(options: argparse.Namespace) -> None:
    """Load, compile, serve; leave the logits of a prompt, and print bytes as JSON."""
    _load_libraries(options.model)
    bare = resident("VmRSS")
    model = from_pretrained(options.child)
    count, longest, num_new = (4, 64, 8) if options.quick else (32, 1024, 64)
    runner = Runner(
        model, max_seqs=count, max_tokens=1024, kv_tokens=count * (longest + num_new + 16)
    )
    prompts = make_prompts(count, model.vocab_size, longest=longest)
    runner.warm_up()
    gc.collect()
    ready = resident("VmRSS")
    reset_peak()
    serve(Engine(runner), prompts, num_new)
    peak = resident("VmHWM")
    logits = runner.extend(runner.new_sequences(1), prompts[:1])
    torch.save(logits, options.child / "logits.pt")
    found = {
        "bare": bare,
        "ready": ready,
        "peak": peak,
        "weights": float(sum(weight.nbytes for weight in set(model.parameters()))),
        "pools": float(runner.report().pool_bytes),
        "activations": largest_activations(model, max_tokens=1024, max_seqs=count),
    }
    print(json.dumps({"bytes": found, "prompt": prompts[0]}))


def main() -> None:
    """Save a checkpoint, serve it in a fresh process, check, print."""
    parser = arguments("Peak resident set of serving.")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parse(parser)
    if options.child:
        _child(options)
        return
    hf_model = make_model(options.model, options.torch_dtype, quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        command = [sys.executable, "-m", "benchmarks.memory", "--child", folder]
        command += ["--quick"] if options.quick else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the serving process failed: {done.stdout}")
        found = json.loads(done.stdout.splitlines()[-1])
        logits = torch.load(Path(folder, "logits.pt"))
    Oracle(hf_model).check("ours", logits, [found["prompt"]])
    _report(options, found["bytes"])


def _report(options: argparse.Namespace, found: dict[str, float]) -> None:
    results = Results(title=title(options, "Memory"), columns=["", "MB"])
    needed = found["weights"] + found["pools"] + found["activations"]
    rows = {
        "weights": found["weights"],
        "pools": found["pools"],
        "largest activation set": found["activations"],
        "the three together": needed,
        "Python, torch, transformers, compiler": found["bare"],
        "resident when compiled": found["ready"],
        "peak resident while serving": found["peak"],
    }
    for name, size in rows.items():
        results.add(name, size / MB)
    beyond = (found["peak"] - found["bare"]) / needed
    results.notes.append(f"without Python and the libraries: {beyond:.3g}x")
    results.targets.append(
        Target(name="peak resident over the three", measured=found["peak"] / needed, limit=LIMIT)
    )
    results.emit(options)


if __name__ == "__main__":
    main()
