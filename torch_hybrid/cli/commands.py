"""The command line: ``torch-hybrid demo | generate | chat | serve | bench | explain``.

Results go to stdout, progress to stderr. A user's mistake is one message and exit code 2.
No command imports torch before it needs it: help, versions and mistyped options come at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

try:
    import click
    import rich  # noqa: F401  (the modules below need it)
except ImportError as error:
    print(
        f"torch-hybrid needs {error.name}: pip install 'torch-hybrid[hf]'",
        file=sys.stderr,
    )
    raise SystemExit(2) from error

from torch_hybrid.cli.chat import converse
from torch_hybrid.cli.options import (
    SEED,
    ModelOptions,
    SamplingOptions,
    ServerOptions,
    compile_ahead,
    finish_artefact,
    load_processor,
    load_tokenizer,
    lora_option,
    model_options,
    prefix_cache_option,
    sampling_options,
    server_options,
    speculate_option,
)
from torch_hybrid.cli.output import (
    accept_any_text,
    err,
    note,
    out,
    print_each,
    print_error,
    print_json,
    print_model,
    print_section,
    stream_output,
)
from torch_hybrid.cli.prompts import read_prompts, user_message
from torch_hybrid.cli.ranks import join_ranks
from torch_hybrid.errors import CapacityError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_hybrid.models.hybrid_model import HybridModel
    from torch_hybrid.serving.engine import Engine


NO_LORAS: Mapping[str, str] = {}


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
@click.option("--chat", is_flag=True, help="Prompts are messages of a user, to be answered.")
@click.option("--system", help="A system message before each of them, with --chat.")
@click.option(
    "--image",
    "images",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    help="An image that each prompt is about, as with --chat; several can be given.",
)
@sampling_options(max_new_tokens=64)
@prefix_cache_option(default=0)
@speculate_option
@lora_option
@click.option("--adapter", help="Name of the adapter to use; by default the only one of --lora.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each output.")
def generate(
    options: ModelOptions,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    ids: bool,
    chat: bool,
    system: str | None,
    images: tuple[str, ...],
    chosen: SamplingOptions,
    prefix_cache: int,
    speculate: str | None,
    loras: dict[str, str],
    adapter: str | None,
    as_json: bool,
) -> None:
    """Continue PROMPTS: one of them streams, several are served together."""
    parsed = read_prompts(prompts, prompt_file, ids=ids, chat=chat, system=system, images=images)
    chosen.check()
    processor = load_processor(options.model) if images else None
    model = options.load(vision=bool(images), mtp=speculate == "mtp")
    tokenizer = None if ids or images else load_tokenizer(options.model)
    sampling = chosen.of(model, has_texts=not ids)
    if adapter is None and len(loras) == 1:
        (adapter,) = loras
    with _engine(
        options, model, tokenizer, prefix_cache, speculate, processor, loras=loras
    ) as engine:
        stream = not as_json
        requests = [engine.submit(p, sampling, stream=stream, adapter=adapter) for p in parsed]
        compile_ahead(engine.runner)
        if as_json:
            print_json(engine, requests)
        elif len(requests) == 1:
            stream_output(engine, requests[0])
        else:
            print_each(engine, requests)
        finish_artefact(options, engine.runner)
    if any(request.output is None or request.output.error for request in requests):
        raise SystemExit(1)


@cli.command(short_help="Talk to a model; Ctrl-C ends an answer, Ctrl-D the conversation.")
@model_options
@click.option("--system", help="A system message before the conversation.")
@sampling_options(max_new_tokens=1024)
@prefix_cache_option(default=4)
@speculate_option
def chat(
    options: ModelOptions,
    system: str | None,
    chosen: SamplingOptions,
    prefix_cache: int,
    speculate: str | None,
) -> None:
    """Talk to MODEL by its chat template. /new begins anew, /exit or Ctrl-D ends."""
    chosen.check()
    if options.ranks:
        raise ValueError("chat has one terminal, and --ranks several processes: use generate")
    model = options.load(mtp=speculate == "mtp")
    tokenizer = load_tokenizer(options.model, hint="it cannot chat")
    sampling = chosen.of(model)
    with _engine(options, model, tokenizer, prefix_cache, speculate) as engine:
        engine.submit(
            [user_message("?")], sampling
        )  # a template that is missing shows before compiling
        engine.close()
        compile_ahead(engine.runner)
        converse(engine, sampling, system)
        finish_artefact(options, engine.runner)


@cli.command(short_help="Serve OpenAI's API over HTTP.")
@model_options
@server_options
@prefix_cache_option(default=16)
@speculate_option
@lora_option
def serve(
    options: ModelOptions,
    server: ServerOptions,
    prefix_cache: int,
    speculate: str | None,
    loras: dict[str, str],
) -> None:
    """Serve MODEL by OpenAI's API until SIGTERM, which lets running requests end."""
    try:
        from torch_hybrid.http.app import create_app
        from torch_hybrid.http.run import run, run_follower
    except ImportError as error:
        missing = f"serve needs {error.name}: pip install 'torch-hybrid[serve]'"
        raise ValueError(missing) from error

    def open_engine() -> Engine:
        return open_for_serving(
            options, prefix_cache, speculate, server.max_queue, vision=server.vision, loras=loras
        )

    if options.ranks and join_ranks(options.device)[0].rank() != 0:
        run_follower(open_engine)
        return
    app = create_app(
        open_engine,
        model=server.served_model_name or options.model,
        api_key=server.api_key,
        max_body=server.max_body * 2**20,
        max_wait_s=server.max_wait,
        origins=server.allow_origin,
        log_requests=server.log_requests,
    )
    run(
        app,
        host=server.host,
        port=server.port,
        drain_s=server.drain,
        listens=lambda url: note(f"listening on {url}"),
    )


def open_for_serving(
    options: ModelOptions,
    prefix_cache: int,
    speculate: str | None,
    max_waiting: int,
    *,
    vision: bool = False,
    loras: Mapping[str, str] = NO_LORAS,
) -> Engine:
    """Load a model and its tokenizer into an engine; compile if steps should be compiled first."""
    model = options.load(vision=vision, mtp=speculate == "mtp")
    processor = load_processor(options.model) if vision else None
    tokenizer = load_tokenizer(options.model, hint="it cannot be served over HTTP")
    engine = _engine(
        options, model, tokenizer, prefix_cache, speculate, processor, max_waiting, loras=loras
    )
    compile_ahead(engine.runner, capture=True)
    return engine


def _engine(
    options: ModelOptions,
    model: HybridModel,
    tokenizer: Any,
    prefix_cache: int,
    speculate: str | None,
    processor: Any = None,
    max_waiting: int | None = None,
    *,
    loras: Mapping[str, str] = NO_LORAS,
) -> Engine:
    """Make an engine of these options, with a cache of ``prefix_cache`` snapshots, if any.

    Its runner has a slot for each adapter of ``loras``, as wide as the largest rank.
    """
    from torch_hybrid.models.read_adapter import adapts_experts, largest_rank, saves_modules
    from torch_hybrid.serving.engine import Engine

    speculation = options.speculation(speculate)
    max_drafts = 0 if speculation is None else speculation.num_drafts
    adapters: dict[str, Any] = {"max_adapters": len(loras)}
    if loras:
        folders = [Path(folder) for folder in loras.values()]
        adapters["max_lora_rank"] = max(map(largest_rank, folders))
        adapters["saved_modules"] = any(map(saves_modules, folders))
        adapters["expert_adapters"] = any(map(adapts_experts, folders))
    runner = options.runner(model, max_snapshots=prefix_cache, max_drafts=max_drafts, **adapters)
    return Engine(
        runner,
        tokenizer,
        prefix_cache=prefix_cache > 0,
        speculate=speculation,
        processor=processor,
        max_waiting=max_waiting,
        adapters=loras,
    )


@cli.command(short_help="Serve a tiny trained hybrid and check it against transformers.")
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    default=48,
    show_default=True,
    help="Fresh prompts to serve.",
)
@click.option("--seed", type=SEED, help="Draws the same prompts again; by default they are new.")
@click.option("--model", type=click.Path(path_type=Path), help="Another checkpoint of the task.")
def demo(num_prompts: int, seed: int | None, model: Path | None) -> None:
    """Serve a tiny hybrid, trained to recall, and check it against transformers."""
    from torch_hybrid.cli.demo import show

    show(num_prompts, seed, model)


@cli.command(
    short_help="Measure speed and memory, in a checkout of the repository.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Hand ARGUMENTS to benchmarks.run_all, in a process of its own."""
    root = Path(__file__).parents[2]
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
    options: ModelOptions,
    overlap: Literal["off", "on", "auto"],
    passes: bool,
    diff: str | None,
    without: tuple[str, ...],
    trace: Path | None,
) -> None:
    """Show what MODEL becomes: its layers, implementations, graphs and pools."""
    from torch_hybrid.explain import sections as explain
    from torch_hybrid.graphs.passes import DEFAULT_PASSES, with_text
    from torch_hybrid.graphs.passes import without as passes_without

    passes_without(DEFAULT_PASSES, [diff] if diff else [])  # names are checked first
    chosen = with_text(passes_without(DEFAULT_PASSES, without), diff or "")
    if trace is not None:
        _check_writable(trace)
    model = options.load()
    runner = options.compiled_first().runner(model, two_batch_overlap=overlap, passes=chosen)
    runner.warm_up(capture=False)
    print_model(options.model, model)
    sections = explain.explain(runner)
    if runner.compile:
        report = runner.report()
        sections += [*([explain.passes(report)] if passes else []), *explain.schedules(report)]
    for section in sections:
        print_section(section)
    if diff is not None:
        for step, lines in explain.pass_diffs(runner.report(), diff).items():
            out.print(f"{diff} in {step}", style="bold", markup=False)
            out.print(lines or "nothing changed", markup=False, soft_wrap=True)
    if trace is not None:
        from torch_hybrid.explain.trace import write_trace

        write_trace(runner, trace)
        shown = f"timeline written to {trace}: open it at https://ui.perfetto.dev"
        out.print(shown, markup=False, soft_wrap=True)


@cli.command("check-bits", short_help="Compare a server's probabilities with a trainer's.")
@click.argument("model")
@click.option("--dtype", default="auto", help="Format of the weights: bf16, fp16 or fp32.")
@click.option("--device", default="cpu", help="Device of both.", show_default=True)
@click.option("--eager", is_flag=True, help="Run the server without compiling.")
@click.option("--tokens", default=32, help="Tokens of each of four answers.", show_default=True)
def check_bits(model: str, dtype: str, device: str, eager: bool, tokens: int) -> None:
    """Compare a server's log-probabilities of sampled tokens with a trainer's, bit for bit.

    Both have the weights of MODEL; the trainer is th.make_trainable(batch_invariant=True).
    """
    from torch_hybrid.cli.check_bits import compare, trainer_and_server
    from torch_hybrid.models.arguments import checked_dtype

    trainer, server = trainer_and_server(model, checked_dtype(dtype), device, compile=not eager)
    answers = list(compare(trainer, server, tokens))
    for each in answers:
        told = "equal" if each.first is None else f"part at token {each.first}"
        out.print(
            f"prompt of {each.num_prompt}, {each.num_tokens} tokens: {told}; "
            f"an ordinary trainer is up to {each.plain:.1e} off"
        )
    if any(each.first is not None for each in answers):
        raise SystemExit(1)


def _check_writable(path: Path) -> None:
    """Check that a file can be written, before minutes of work for it; keep an old one.

    Raises:
        ValueError: the file cannot be written.
    """
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    if is_new:
        path.unlink()


def _show_warning(message: Warning | str, *_where: object) -> None:
    """Print a warning as one line, without the place in the code that gave it."""
    first, *_ = str(message).splitlines() or [""]
    note(f"warning: {first}")


def _mistakes() -> tuple[type[Exception], ...]:
    """List the errors that come from a user's input or installation: each prints as one line."""
    known = (TypeError, ValueError, UnsupportedError, CapacityError)
    if "torch" not in sys.modules:
        return known
    from torch_hybrid.ops.native import BuildError

    return (*known, BuildError)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2."""
    accept_any_text()
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except _mistakes() as error:
        err.quiet = False  # also on a rank that is silent otherwise
        print_error(str(error))
        sys.exit(2)
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (KeyboardInterrupt, click.Abort):
        err.print("interrupted")
        sys.exit(130)
