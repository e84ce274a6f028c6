"""The demo as the command line shows it: served tokens, a comparison with transformers, speeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torch_hybrid.cli.options import can_compile, load_model
from torch_hybrid.cli.output import out, print_fact, print_model
from torch_hybrid.demo import serve
from torch_hybrid.demo.task import RecallPrompt, checkpoint_path, make_prompts
from torch_hybrid.graphs.report import Report
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.host.progress import bar

ROUNDS = 3  # timed runs; the fastest counts
ALONE_ROUNDS = 10  # timed runs with prompts one by one; each takes a tenth of a second


def show(num_prompts: int, seed: int | None, model: Path | None) -> None:
    """Serve fresh prompts, compare with transformers, and print every fact of this run.

    Without a ``seed`` they are new; without a ``model`` the package's own serves them.
    """
    path = model or checkpoint_path()
    prompts = make_prompts(num_prompts, random.randrange(2**32) if seed is None else seed)
    loaded = load_model(str(path))
    print_model("torch-hybrid demo: recall of what a prompt binds", loaded)
    runner = serve.make_runner(loaded, prompts, compile=can_compile(loaded.device))
    runner.warm_up()
    with bar("serving"):
        served = serve.serve(runner, prompts)
    theirs = serve.load_transformers(path)
    with bar("transformers, one by one", total=num_prompts) as advance:
        alone = serve.transformers_one_by_one(
            theirs, prompts, lambda: advance(1, "transformers, one by one")
        )
    contestants = _contestants(runner, theirs, prompts)
    with bar(f"timing {', '.join(contestants)}"):
        seconds = serve.fastest(contestants, rounds=ROUNDS)
    recalled = serve.compare(prompts, served, alone)
    lengths = [len(prompt.tokens) for prompt in prompts]
    out.print(
        f"{num_prompts} prompts of {min(lengths)} to {max(lengths)} tokens served together, "
        f"{recalled.num_tokens} new tokens\n"
    )
    _print_recalled(recalled, num_prompts)
    _print_report(runner)
    _print_speed(seconds, recalled.num_tokens)
    if serve.has_head(path):
        _print_drafted(_served_alone(runner, path, prompts))
    out.print()


def _served_alone(runner: Runner, path: Path, prompts: list[RecallPrompt]) -> serve.Drafted:
    """Serve the first prompts again, one by one, without drafts and with those of the MTP head."""
    model = load_model(str(path), mtp=True)
    drafting = serve.make_drafting_runner(model, compile=bool(runner.compile))
    drafting.warm_up()
    with bar("serving one by one, with drafts and without"):
        return serve.serve_alone(runner, drafting, prompts, rounds=ALONE_ROUNDS)


def _contestants(
    runner: Runner, theirs: Any, prompts: list[RecallPrompt]
) -> dict[str, Callable[[], Any]]:
    """List the runs to time; transformers is compiled only where the runner is too."""
    timed: dict[str, Callable[[], Any]] = {
        "torch_hybrid": lambda: serve.serve(runner, prompts),
        "transformers, eager": lambda: serve.transformers_batch(theirs, prompts),
    }
    if runner.compile:
        timed["transformers, compiled"] = lambda: serve.transformers_batch(
            theirs, prompts, compiled=True
        )
    return timed


def _print_recalled(recalled: serve.Recalled, num_prompts: int) -> None:
    total = recalled.num_tokens
    accuracy = recalled.num_right / total
    equal = "yes" if recalled.num_equal == total else "no"
    print_fact(
        "recall",
        f"{accuracy:.1%}: {recalled.num_right} of {total} tokens, "
        f"{recalled.num_whole} of {num_prompts} prompts without a miss",
        good=accuracy >= 0.99,
    )
    print_fact(
        "as transformers",
        f"{equal}: {recalled.num_equal} of {total} tokens equal to its own generate",
        good=recalled.num_equal == total,
    )


def _print_report(runner: Runner) -> None:
    if not runner.compile:
        print_fact("compiled", "no: there is nothing to compile with", good=False)
        return
    report: Report = runner.report()
    num_clones = len(report.pool_clones)
    print_fact(
        "compiled",
        f"{len(report.graphs)} graphs, {report.graph_breaks} breaks, "
        f"{report.recompiles} recompiles, {num_clones} pool clones",
        good=not (report.graph_breaks or report.recompiles or num_clones),
    )


def _print_speed(seconds: Mapping[str, float], num_tokens: int) -> None:
    ours, *theirs = seconds.values()
    ratio = min(theirs) / ours
    better = f"{ratio:.1f} times transformers at its better, on {torch.get_num_threads()} threads"
    print_fact("speed", better, good=ratio >= 1)
    _print_rates(seconds, num_tokens)


def _print_drafted(drafted: serve.Drafted) -> None:
    without, with_drafts = drafted.seconds.values()
    speedup = without / with_drafts
    same = "the same tokens" if drafted.is_equal else "other tokens"
    print_fact(
        "drafts",
        f"{speedup:.1f} times one prompt at a time: {drafted.acceptance:.0%} right, {same}",
        good=drafted.is_equal and speedup >= 1,
    )
    _print_rates(drafted.seconds, drafted.num_tokens)


def _print_rates(seconds: Mapping[str, float], num_tokens: int) -> None:
    for name, duration in seconds.items():
        out.print(f"{'':18}{num_tokens / duration:8,.0f} tokens/s  {duration:7.3f} s  {name}")
