"""Every benchmark, one after the other, and one Markdown page of what they print.

python -m benchmarks.run_all [--list] [--quick] [--only NAME ...] [--models NAME ...] [--page FILE]

A benchmark is a module or a package of this folder that can be run. Those of GPUs are named and
left out where torch sees no CUDA device.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.models import FAMILIES

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What has to be known of a benchmark before it is run."""

    quick: tuple[str, ...] = ()  # arguments for few rounds or tiny sizes, to see that it runs
    for_each: bool = False  # says something about every family and dtype
    has_options: bool = False  # takes what ``results.arguments`` has, --markdown among it
    needs_cuda: bool = False


_OF_STEPS = Traits(quick=("--quick",), has_options=True)
_OF_STEPS_ON_CUDA = Traits(quick=("--quick",), has_options=True, needs_cuda=True)
_OF_FAMILIES = Traits(quick=("--quick",), has_options=True, for_each=True)
_TIMED = Traits(quick=("--seconds", "0.01"))

TRAITS = {
    "batch_invariant": _OF_STEPS,
    "compile_time": _OF_STEPS,
    "cuda_graphs": _OF_STEPS_ON_CUDA,
    "decode": _OF_FAMILIES,
    "floor": _OF_STEPS,
    "gpu": Traits(quick=("--parts", "token_ops", "--only", "router"), needs_cuda=True),
    "grammar": _OF_STEPS,
    "gpu_memory": Traits(quick=("--kv-tokens", "8192"), needs_cuda=True),
    "http": _OF_STEPS,
    "http_against": _OF_STEPS,
    "integers": Traits(quick=("--prompts", "4")),
    "latent_prefix": Traits(quick=("--prefixes", "256", "--tokens", "16", "--budget", "128")),
    "llama_cpp": _OF_FAMILIES,
    "lm_eval": _OF_STEPS,
    "load": _OF_STEPS,
    "memory": _OF_STEPS,
    "overhead": _OF_STEPS,
    "overlap": Traits(quick=("--layers", "1", "--tokens", "128", "--delays", "0", "--rounds", "1")),
    "prefill": _OF_FAMILIES,
    "prefix_cache": _OF_STEPS,
    "serve": _OF_STEPS,
    "speculation": _OF_STEPS,
    "spills": Traits(quick=("--march", "x86-64-v3", "--only", "rg_lru")),
    "state_copy": Traits(quick=("--rounds", "1")),
    "training_compile_time": _OF_STEPS,
    "training_gpu": Traits(quick=("--layers", "4", "--rows", "1"), needs_cuda=True),
    "training_ops": Traits(quick=("--repeats", "1")),
    "training_steps": Traits(
        quick=("--layers", "1", "--packings", "2x32", "--rounds", "1", "--compile-limit", "0")
    ),
    "whole_model": Traits(quick=("--layers", "4"), needs_cuda=True),
}


def traits_of(name: str) -> Traits:
    """What is known of a benchmark: most take seconds, as ``clock_arguments`` has them."""
    return TRAITS.get(name, _TIMED)


def discover() -> list[str]:
    """Names of the benchmarks: modules and packages here that do something when they are run."""
    modules = (file for file in FOLDER.glob("*.py") if file.stem != Path(__file__).stem)
    packages = (file.parent.name for file in FOLDER.glob("*/__main__.py"))
    return sorted([*(file.stem for file in modules if _can_be_run(file)), *packages])


def source(name: str) -> Path:
    """The file that is run."""
    package = FOLDER / name / "__main__.py"
    return package if package.exists() else FOLDER / f"{name}.py"


def _can_be_run(file: Path) -> bool:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in body)


def summary(name: str) -> str:
    """The first sentence that a benchmark says of itself."""
    doc = ast.get_docstring(ast.parse(source(name).read_text(encoding="utf-8"))) or ""
    return " ".join(doc.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def jobs(
    names: Sequence[str], models: Sequence[str], dtypes: Sequence[str], *, quick: bool
) -> list[list[str]]:
    """The command lines to run: a benchmark's name and its arguments."""
    found = []
    for name in names:
        traits = traits_of(name)
        options: list[list[str]] = [[]]
        if traits.for_each:
            options = [["--model", m, "--dtype", d] for m in models for d in dtypes]
        elif traits.has_options:
            options = [["--model", models[0]]]
        found += [[name, *each, *(traits.quick if quick else ())] for each in options]
    return found


def run(job: Sequence[str]) -> tuple[bool, str]:
    """Run one in a process of its own; whether it went well, and its part of the page."""
    shown = f"`python -m benchmarks.{' '.join(job)}`"
    print(f"\n{shown}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.md")
        has_page = traits_of(job[0]).has_options
        writes = ["--markdown", str(page)] if has_page else []
        command = [sys.executable, "-m", f"benchmarks.{job[0]}", *job[1:], *writes]
        lines = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                lines.append(line)
        told = page.read_text() if page.exists() else f"```\n{''.join(lines)}```\n"
    return process.returncode == 0, f"{told}\n{shown}\n"


def main() -> None:
    """Run them in fresh processes; a failed one is named and the others go on."""
    names = discover()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_all", description=__doc__)
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=["qwen3_next"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], metavar="DTYPE")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds or tiny sizes, to see that they run"
    )
    parser.add_argument("--page", type=Path, help="where the Markdown goes")
    options = parser.parse_args()
    if options.list:
        for name in options.only:
            on_gpu = " (needs a CUDA device)" if traits_of(name).needs_cuda else ""
            print(f"{name:22}{summary(name)}{on_gpu}")
        return
    pages, failed = [], []
    for job in jobs(options.only, options.models, options.dtypes, quick=options.quick):
        if traits_of(job[0]).needs_cuda and not torch.cuda.is_available():
            print(f"\n{job[0]} needs a CUDA device: not run", flush=True)
            pages.append(f"{job[0]} needs a CUDA device: not run\n")
            continue
        went_well, page = run(job)
        pages.append(page)
        if not went_well:
            failed.append(" ".join(job))
    if options.page:
        options.page.write_text("\n".join(pages))
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
