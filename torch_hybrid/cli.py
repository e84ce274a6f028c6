"""The command line: ``torch-hybrid demo | generate | bench | explain``.

Results go to stdout, progress to stderr. What a user got wrong is one message and exit code 2.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

try:
    import click
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    print(
        f"torch-hybrid needs {error.name}: pip install 'torch-hybrid[hf]'",
        file=sys.stderr,
    )
    raise SystemExit(2) from error

import torch

from torch_hybrid.backends.select import Backends
from torch_hybrid.engine import Engine
from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.explain import Section, byte_count, explain, pass_diffs, pattern, schedules
from torch_hybrid.explain import passes as explain_passes
from torch_hybrid.graphs.passes import DEFAULT_PASSES
from torch_hybrid.graphs.passes import without as chosen_passes
from torch_hybrid.graphs.report import Report
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.host import tune_allocator
from torch_hybrid.models.load import from_pretrained
from torch_hybrid.request import Output, Request, TokenEvent
from torch_hybrid.sampling import Sampling

if TYPE_CHECKING:
    from torch_hybrid.demo.serve import Recalled
    from torch_hybrid.models.hybrid_model import HybridModel
    from torch_hybrid.models.ring_2_5 import Ring25

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Option = Callable[[Callable[..., Any]], Callable[..., Any]]

_MODEL_OPTIONS: tuple[Option, ...] = (
    click.argument("model"),
    click.option("--dtype", default="auto", show_default=True, help="Of the weights."),
    click.option("--max-seqs", default=16, show_default=True, help="Sequences served at once."),
    click.option("--max-tokens", default=1024, show_default=True, help="New tokens in one step."),
    click.option("--kv-tokens", default=16384, show_default=True, help="Tokens held in all."),
    click.option("--eager", is_flag=True, help="Run without compiling."),
    click.option("--full", default="auto", show_default=True, help="Full attention by name."),
    click.option("--linear", default="auto", show_default=True, help="Linear attention by name."),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument and options of every command that loads a model."""
    for option in reversed(_MODEL_OPTIONS):
        command = option(command)
    return command


@click.group()
@click.version_option(package_name="torch-hybrid")
def cli() -> None:
    """Serve hybrid attention language models, each step one compiled graph.

    MODEL is a folder as save_pretrained writes it, or a hub id.
    """


@cli.command(short_help="Continue prompts: one streams, several are served together.")
@model_options
@click.argument("prompts", nargs=-1)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="One prompt in each line.")
@click.option("--ids", is_flag=True, help="Prompts are token ids, as in '5 17 3'.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", default=0, show_default=True, help="0 is off.")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--min-p", default=0.0, show_default=True)
@click.option("--seed", type=int, help="Repeats a draw.")
@click.option("--stop", multiple=True, help="A text that ends the output; several can be given.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each output.")
def generate(
    model: str,
    dtype: str,
    max_seqs: int,
    max_tokens: int,
    kv_tokens: int,
    eager: bool,
    full: str,
    linear: str,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    ids: bool,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    as_json: bool,
) -> None:
    """Continue PROMPTS: one of them streams, several are served together."""
    texts = [*prompts, *(_read_lines(prompt_file) if prompt_file else [])]
    if not texts:
        raise ValueError("a prompt is needed, or --prompt-file with one in each line")
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    parsed = [_parse_ids(text) for text in texts] if ids else texts
    loaded = load_model(model, dtype)
    tokenizer = None if ids else load_tokenizer(model)
    runner = Runner(
        loaded,
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        kv_tokens=kv_tokens,
        compile=not eager,
        backends=Backends(full=full, linear=linear),
    )
    with Engine(runner, tokenizer) as engine:
        requests = [engine.submit(prompt, sampling, stream=not as_json) for prompt in parsed]
        compile_steps(runner)
        if as_json:
            _print_json(engine, requests)
        elif len(requests) == 1:
            _print_stream(engine, requests[0])
        else:
            _print_each(engine, requests)
    if any(request.output is None or request.output.error for request in requests):
        raise SystemExit(1)


@cli.command(short_help="Serve a tiny trained hybrid and check it against transformers.")
@click.option("--num-prompts", default=48, show_default=True, help="Fresh prompts to serve.")
@click.option("--seed", type=int, help="Draws the same prompts again; by default they are new.")
@click.option("--model", type=click.Path(path_type=Path), help="Another checkpoint of the task.")
def demo(num_prompts: int, seed: int | None, model: Path | None) -> None:
    """Serve a tiny hybrid, trained to recall, and check it against transformers."""
    from torch_hybrid.demo import serve
    from torch_hybrid.demo.task import checkpoint_path, make_prompts

    path = model or checkpoint_path()
    prompts = make_prompts(num_prompts, random.randrange(2**32) if seed is None else seed)
    lengths = [len(prompt.tokens) for prompt in prompts]
    loaded = load_model(str(path), "auto")
    _print_model("torch-hybrid demo: recall of what a prompt binds", loaded)
    runner = serve.make_runner(loaded, prompts)
    compile_steps(runner)
    with progress("serving"):
        served = serve.serve(runner, prompts)
    theirs = serve.load_transformers(path)
    with progress("transformers, one by one", total=num_prompts) as advance:
        alone = serve.transformers_one_by_one(
            theirs, prompts, lambda: advance(1, "transformers, one by one")
        )
    with progress("timing both, transformers eager and compiled"):
        seconds = serve.fastest(
            {
                "torch_hybrid": lambda: serve.serve(runner, prompts),
                "transformers, eager": lambda: serve.transformers_batch(theirs, prompts),
                "transformers, compiled": lambda: serve.transformers_batch(
                    theirs, prompts, compiled=True
                ),
            },
            rounds=3,
        )
    recalled = serve.compare(prompts, served, alone)
    out.print(
        f"{num_prompts} prompts of {min(lengths)} to {max(lengths)} tokens served together, "
        f"{recalled.num_tokens} new tokens\n"
    )
    _print_recalled(recalled, num_prompts)
    _print_report(runner.report())
    _print_speed(seconds, recalled.num_tokens)


@cli.command(
    short_help="Measure speed and memory, in a checkout of the repository.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Hand ARGUMENTS to benchmarks.run_all, in a process of its own."""
    root = Path(__file__).parents[1]
    if not (root / "benchmarks" / "run_all.py").is_file():
        raise ValueError(
            f"the benchmarks are in the repository and not in the package: there is no "
            f"{root / 'benchmarks'}; run this in a checkout"
        )
    command = [sys.executable, "-m", "benchmarks.run_all", *arguments]
    raise SystemExit(subprocess.run(command, cwd=root, check=False).returncode)


@cli.command("explain", short_help="Show layers, implementations, graphs and pools.")
@model_options
@click.option(
    "--overlap",
    default="off",
    type=click.Choice(["off", "on", "auto"]),
    show_default=True,
    help="Run steps as two interleaved halves; shows their schedule.",
)
@click.option("--passes", is_flag=True, help="Show what each graph pass did.")
@click.option("--diff", metavar="PASS", help="Show the lines that a pass changed in each graph.")
@click.option("--without", metavar="PASS", multiple=True, help="Switch a pass off.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a timeline for Perfetto.")
def explain_command(
    model: str,
    dtype: str,
    max_seqs: int,
    max_tokens: int,
    kv_tokens: int,
    eager: bool,
    full: str,
    linear: str,
    overlap: Literal["off", "on", "auto"],
    passes: bool,
    diff: str | None,
    without: tuple[str, ...],
    trace: Path | None,
) -> None:
    """Show what MODEL becomes: its layers, implementations, graphs and pools."""
    chosen_passes(DEFAULT_PASSES, [*without, *([diff] if diff else [])])  # names are checked first
    loaded = load_model(model, dtype)
    runner = Runner(
        loaded,
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        kv_tokens=kv_tokens,
        compile=not eager,
        backends=Backends(full=full, linear=linear),
        two_batch_overlap=overlap,
        switched_off=without,
        keep_pass_text=diff is not None,
    )
    compile_steps(runner)
    _print_model(model, loaded)
    sections = explain(runner)
    if runner.compile:
        report = runner.report()
        sections += [*([explain_passes(report)] if passes else []), *schedules(report)]
    for section in sections:
        print_section(section)
    if diff is not None:
        for step, lines in pass_diffs(runner.report(), diff).items():
            out.print(f"{diff} in {step}", style="bold", markup=False)
            out.print(lines or "nothing changed", markup=False, soft_wrap=True)
    if trace is not None:
        from torch_hybrid.trace import write_trace

        write_trace(runner, trace)
        shown = f"timeline written to {trace}: open it at https://ui.perfetto.dev"
        out.print(shown, markup=False, soft_wrap=True)


def load_model(path_or_id: str, dtype: str) -> HybridModel | Ring25:
    """A checkpoint, with a spinner for as long as it loads."""
    if path_or_id.startswith((".", "/", "~")) and not Path(path_or_id).is_dir():
        raise ValueError(f"there is no folder {path_or_id}")
    _quiet_transformers()
    with progress("loading"):
        return from_pretrained(path_or_id, dtype=dtype)


def load_tokenizer(path_or_id: str) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        ValueError: it has none.
    """
    from transformers import AutoTokenizer

    missing = (
        f"{path_or_id} has no tokenizer that transformers can read; "
        f"give prompts as token ids with --ids"
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_id)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(missing) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(missing)  # without its files it is made all the same, and knows no text
    return tokenizer


def compile_steps(runner: Runner) -> None:
    """Compile every kind of step ahead, with a bar."""
    if not runner.compile:
        return
    with progress("compiling", total=len(runner.variants)) as advance:
        started: list[str] = []

        def on_variant(name: str) -> None:
            advance(int(bool(started)), f"compiling the {name} step")
            started.append(name)

        runner.warm_up(on_variant)


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr while the body runs; yields ``advance(by, description)``."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        *([MofNCompleteColumn()] if total is not None else []),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        task = bars.add_task(description, total=total)

        def advance(by: int, text: str = description) -> None:
            bars.update(task, advance=by, description=text)

        yield advance


def print_section(section: Section) -> None:
    """A table with its title above."""
    table = Table(
        title=section.title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        header_style="dim",
    )
    for column in section.columns:
        table.add_column(column, no_wrap=column in ("op", "kind", "ops"), overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))  # Text: square brackets are no markup
    out.print(table)


def _print_model(title: str, model: HybridModel | Ring25) -> None:
    num_params = sum(weight.numel() for weight in model.parameters())
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    dtype_name = str(model.dtype).removeprefix("torch.")
    out.print()
    out.print(title, style="bold", markup=False, soft_wrap=True)
    out.print(
        f"{model.model_type}, {num_params:,} parameters, {byte_count(num_bytes)} in {dtype_name}"
    )
    legend = "[dim](F full attention, L linear attention, B both, - none)[/]"
    out.print(f"layers {pattern(model.table)}  {legend}\n")


def _print_recalled(recalled: Recalled, num_prompts: int) -> None:
    total = recalled.num_tokens
    accuracy = recalled.num_right / total
    equal = "yes" if recalled.num_equal == total else "no"
    _print_fact(
        "recall",
        f"{accuracy:.1%}: {recalled.num_right} of {total} tokens, "
        f"{recalled.num_whole} of {num_prompts} prompts without a miss",
        good=accuracy >= 0.99,
    )
    _print_fact(
        "as transformers",
        f"{equal}: {recalled.num_equal} of {total} tokens equal to its own generate",
        good=recalled.num_equal == total,
    )


def _print_report(report: Report) -> None:
    num_clones = len(report.pool_clones)
    _print_fact(
        "compiled",
        f"{len(report.graphs)} graphs, {report.graph_breaks} breaks, "
        f"{report.recompiles} recompiles, {num_clones} pool clones",
        good=not (report.graph_breaks or report.recompiles or num_clones),
    )


def _print_speed(seconds: Mapping[str, float], num_tokens: int) -> None:
    ours, *theirs = seconds.values()
    ratio = min(theirs) / ours
    better = f"{ratio:.1f} times transformers at its better, on {torch.get_num_threads()} threads"
    _print_fact("speed", better, good=ratio >= 1)
    for name, duration in seconds.items():
        out.print(f"{'':18}{num_tokens / duration:8,.0f} tokens/s  {duration:7.3f} s  {name}")
    out.print()


def _print_fact(name: str, text: str, *, good: bool) -> None:
    mark = "[green]✓[/]" if good else "[red]✗[/]"
    out.print(f"{mark} [bold]{name:<16}[/]{text}")


def _print_stream(engine: Engine, request: Request) -> None:
    """Write one request's text as it comes, and what it took to stderr."""
    start = time.perf_counter()
    events = _run_prompt(engine, request)
    first_token = time.perf_counter() - start
    while True:
        for event in events:
            sys.stdout.write(_shown(event))
        sys.stdout.flush()
        if request.output is not None:
            break
        events = engine.step()
    seconds = time.perf_counter() - start - first_token
    print(flush=True)
    output = request.output
    speed = f", then {(len(output.tokens) - 1) / seconds:.1f} tokens/s" if seconds > 0 else ""
    err.print(f"[dim]{_counts(output)}; first token after {first_token:.2f} s{speed}[/]")
    if output.error is not None:
        _print_error(output.error)


def _run_prompt(engine: Engine, request: Request) -> list[TokenEvent]:
    """Step until the first event, with a bar over the prompt."""
    with progress("prompt", total=len(request.prompt)) as advance:
        while True:
            held = request.num_held
            events = engine.step()
            advance(request.num_held - held, "prompt")
            if events:
                return events


def _print_each(engine: Engine, requests: Sequence[Request]) -> None:
    """Serve together; print each output as it finishes."""
    start = time.perf_counter()
    numbers = {request: number for number, request in enumerate(requests)}
    num_tokens = 0
    with progress("serving", total=len(requests)) as advance:
        while engine.has_unfinished:
            for event in engine.step():
                num_tokens += event.token is not None
                if event.output is not None:
                    advance(1, "serving")
                    _print_output(numbers[event.request], event.output)
    seconds = time.perf_counter() - start
    err.print(
        f"[dim]{len(requests)} requests, {num_tokens} new tokens in {seconds:.2f} s: "
        f"{num_tokens / seconds:.1f} tokens/s[/]"
    )


def _print_output(number: int, output: Output) -> None:
    out.print(f"[bold]{number}[/] [dim]{_counts(output)}[/]")
    shown = output.text if output.text is not None else " ".join(map(str, output.tokens))
    out.print(shown, markup=False, soft_wrap=True)
    if output.error is not None:
        _print_error(f"prompt {number}: {output.error}")


def _print_json(engine: Engine, requests: Sequence[Request]) -> None:
    numbers = {request: number for number, request in enumerate(requests)}
    while engine.has_unfinished:
        for event in engine.step():
            if event.output is not None:
                fields = asdict(event.output) | {"index": numbers[event.request]}
                print(json.dumps(fields, ensure_ascii=False), flush=True)


def _print_error(message: str) -> None:
    err.print("[red]error:[/] ", end="")
    err.print(message, markup=False, soft_wrap=True)


def _shown(event: TokenEvent) -> str:
    """An event's text, or its token id when there is no tokenizer."""
    if event.request.detokenizer is not None:
        return event.text
    return "" if event.token is None else f"{event.token} "


def _counts(output: Output) -> str:
    return f"{len(output.prompt)} + {len(output.tokens)} tokens, {output.finish_reason}"


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read prompts from {path}: {error}") from error
    return [line for line in text.splitlines() if line.strip()]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"with --ids a prompt is token ids as in '5 17 3', got {text!r}") from None


def _quiet_transformers() -> None:
    """Its bars and hints about other packages would mix with ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def main() -> None:
    """Run the command line; what a user got wrong is one message and exit code 2."""
    tune_allocator()
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ValueError, UnsupportedError, CapacityError) as error:
        _print_error(str(error))
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        err.print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
