"""Each op against its floor and the best public kernels, then whole steps, on one GPU.

    python -m benchmarks.gpu [--parts NAME ...] [--only TEXT] [--without NAME ...]
        [--minutes 10] [--json FILE] [--markdown FILE]

Needs a CUDA device. The floor of a call is the larger of two times: of the bytes that it must move,
at the rate of a large pass through memory, and of the FLOPs of the usual form, at the rate of a
bfloat16 product of 8192^3; both rates are measured first. Calls take turns on tensors of their own,
so that the L2 cache holds none but the smallest, and are captured in a graph where they can be; the
fastest replay counts. Every contestant's result is compared with that of implementation "torch" on
the same tensors before it is timed. flash-linear-attention, FlashInfer and cuDNN take part where
they are installed; a blank cell has its reason below the table. Parts may be run apart, on several
GPUs: ``choose`` takes the figures of several runs. Exits with 1 if a part broke off,
or none of our implementations has a figure in some line.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from benchmarks.gpu import (
    attention,
    biased,
    delta_rules,
    delta_steps,
    latents,
    lightning_steps,
    lora,
    mamba2_steps,
    sparse,
    state_spaces,
    token_ops,
    verify_ops,
)
from benchmarks.gpu.adapter_steps import measure_adapter_steps
from benchmarks.gpu.case import Case, Line, measure
from benchmarks.gpu.clock import Rates, measure_rates
from benchmarks.gpu.report import as_json, op_table, step_table, surroundings
from benchmarks.gpu.steps import PARTS, Step, measure_steps, why_not

OPS: Mapping[str, Callable[[], Iterator[Case]]] = {
    "delta_rules": delta_rules.cases,
    "delta_steps": delta_steps.cases,
    "state_spaces": state_spaces.cases,
    "mamba2_steps": mamba2_steps.cases,
    "lightning_steps": lightning_steps.cases,
    "verify_ops": verify_ops.cases,
    "attention": attention.cases,
    "biased": biased.cases,
    "latents": latents.cases,
    "sparse": sparse.cases,
    "token_ops": token_ops.cases,
    "lora": lora.cases,
}

STEPS: Mapping[str, Callable[[Rates], Iterator[Step]]] = {
    **{part: partial(measure_steps, part=part) for part in PARTS},
    "adapter_steps": measure_adapter_steps,
    "expert_adapter_steps": partial(measure_adapter_steps, experts=True),
}


def parse() -> argparse.Namespace:
    """What to run, and where the figures go."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--parts", nargs="+", choices=[*OPS, *STEPS], default=[*OPS, *STEPS])
    parser.add_argument("--only", default="", help="cases whose name has this text in it")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="contestants")
    parser.add_argument("--minutes", type=float, default=10.0, help="no case begins later")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases of the parts that were asked for."""
    cases = chain.from_iterable(make() for part, make in OPS.items() if part in options.parts)
    return [
        replace(case, others={n: o for n, o in case.others.items() if n not in options.without})
        for case in cases
        if options.only in str(case)
    ]


def run(cases: Iterable[Case], rates: Rates, late: float, failures: list[str]) -> Iterator[Line]:
    """Measure one after the other; each is named as it is done."""
    for case in cases:
        if time.monotonic() > late:
            failures.append(f"{case}: not begun in time")
            continue
        begin = time.monotonic()
        try:
            _release()
            line = measure(case, rates)
        # What has been measured must be told, whatever breaks at one case: after some errors
        # nothing runs on the device any more.
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {error}")
            continue
        if line.best is None:
            failures.append(f"{case}: no figure of ours: {[c.why_not for c in line.own.values()]}")
        times = {name: cell.us for name, cell in line.cells.items() if cell.us}
        shown = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
        took = time.monotonic() - begin
        print(f"{case}: floor {line.floor_us:.1f}, {shown} us  [{took:.1f} s]", flush=True)
        yield line


def run_steps(part: str, rates: Rates, failures: list[str]) -> list[Step]:
    """All steps of a part, or those before something broke; none where it cannot run, and why."""
    steps: list[Step] = []
    if reason := why_not(part):
        print(f"{part}: not run: {reason}\n", flush=True)
        return steps
    try:
        _release()
        for step in STEPS[part](rates):
            print(f"{step.name}: {step.synchronised_ms:.2f} ms", flush=True)
            steps.append(step)
    # As above.
    except Exception as error:
        failures.append(f"{part}: {type(error).__name__}: {error}")
    return steps


def _release() -> None:
    """Give back what was allocated before, of which nothing is in use."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Steps first, whose figures are wanted most; then op by op."""
    options = parse()
    cases = chosen(options)
    if options.list:
        print("\n".join(map(str, cases)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device: torch.cuda.is_available() is False")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    begin = time.monotonic()
    torch.manual_seed(0)
    failures: list[str] = []
    with torch.no_grad():
        rates = measure_rates()
        print(f"{surroundings()}\n{rates}\n", flush=True)
        parts = [part for part in STEPS if part in options.parts]
        steps = [step for part in parts for step in run_steps(part, rates, failures)]
        lines = list(run(cases, rates, begin + 60 * options.minutes, failures))
    tables = [step_table(steps)] * bool(steps) + [op_table(lines, rates)] * bool(lines)
    print(*("\n" + table.text() for table in tables), sep="\n")
    print(f"\n{time.monotonic() - begin:.0f} s", *failures, sep="\nfailed: ")
    if options.markdown:
        options.markdown.write_text("\n".join(table.markdown() for table in tables))
    if options.json:
        content = as_json(lines, steps, rates, failures)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
