"""Output of the command line: results go to stdout, progress and notes to stderr."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_hybrid.host.progress import bar

if TYPE_CHECKING:
    from torch_hybrid.explain.sections import Section
    from torch_hybrid.models.hybrid_model import HybridModel
    from torch_hybrid.serving.engine import Engine
    from torch_hybrid.serving.request import Output, Request, TokenEvent

_LINE_ENDS = "\x85\u2028\u2029"  # json.dumps leaves these line ends unescaped
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def accept_any_text() -> None:
    """Let stdout and stderr print characters that their encoding lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_unicode(console: Console) -> bool:
    """Tell whether a console can show more than ASCII."""
    return console.encoding.startswith("utf")


def note(message: str) -> None:
    """Print a line to stderr that is neither a result nor an error."""
    err.print(message, style="dim", markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error message to stderr."""
    err.print("[red]error:[/] ", end="")
    err.print(message, markup=False, soft_wrap=True)


def print_fact(name: str, text: str, *, good: bool) -> None:
    """Print a fact with a mark that tells whether it is good."""
    mark = ("✓" if good else "✗") if is_unicode(out) else ("+" if good else "!")
    out.print(f"[{'green' if good else 'red'}]{mark}[/] [bold]{name:<16}[/]{text}")


def print_section(section: Section) -> None:
    """Print a table below its title."""
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


def print_model(title: str, model: HybridModel) -> None:
    """Print a model: its title, its size and its pattern of layers."""
    from torch_hybrid.caches.room import byte_count
    from torch_hybrid.explain.sections import pattern

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


def stream_output(engine: Engine, request: Request) -> Output:
    """Write one request's text as it comes; then note its counts and its speed on stderr."""
    start = time.perf_counter()
    events = _run_prompt(engine, request)
    first_token = time.perf_counter() - start
    while True:
        for event in events:
            sys.stdout.write(shown(event))
        sys.stdout.flush()
        if request.output is not None:
            break
        events = engine.step()
    seconds = time.perf_counter() - start - first_token
    print(flush=True)
    output = request.output
    num_after = len(output.tokens) - 1
    speed = f", then {num_after / seconds:.1f} tokens/s" if num_after and seconds else ""
    note(f"{_counts(output)}; first token after {first_token:.2f} s{speed}")
    if output.error is not None:
        print_error(output.error)
    return output


def _run_prompt(engine: Engine, request: Request) -> list[TokenEvent]:
    """Step until the request's first event, with a bar over its prompt."""
    with bar("prompt", total=len(request.prompt)) as advance:
        while True:
            held = request.num_held
            events = engine.step()
            advance(max(0, request.num_held - held), "prompt")  # an ended one holds 0
            if events:
                return events


def print_each(engine: Engine, requests: Sequence[Request]) -> None:
    """Serve requests together; print each output as it finishes."""
    start = time.perf_counter()
    numbers = {request: number for number, request in enumerate(requests)}
    num_tokens = 0
    with bar("serving", total=len(requests)) as advance:
        while engine.has_unfinished:
            for event in engine.step():
                num_tokens += event.token is not None
                if event.output is not None:
                    advance(1, "serving")
                    _print_output(numbers[event.request], event.output)
    seconds = time.perf_counter() - start
    note(
        f"{len(requests)} requests, {num_tokens} new tokens in {seconds:.2f} s: "
        f"{num_tokens / seconds:.1f} tokens/s"
    )


def _print_output(number: int, output: Output) -> None:
    out.print(f"[bold]{number}[/] [dim]{_counts(output)}[/]")
    # Rich would take form feeds out of a text, and make emoji of ":smile:".
    print(output.text if output.text is not None else " ".join(map(str, output.tokens)), flush=True)
    if output.error is not None:
        print_error(f"prompt {number}: {output.error}")


def print_json(engine: Engine, requests: Sequence[Request]) -> None:
    """Serve requests together; print each output as one line of JSON as it finishes."""
    numbers = {request: number for number, request in enumerate(requests)}
    while engine.has_unfinished:
        for event in engine.step():
            if event.output is not None:
                fields = asdict(event.output) | {"index": numbers[event.request]}
                print(_json_line(fields), flush=True)


def _json_line(fields: Mapping[str, object]) -> str:
    """Write JSON without any character at which a reader may end a line."""
    line = json.dumps(fields, ensure_ascii=not is_unicode(out))
    return line.translate({ord(end): f"\\u{ord(end):04x}" for end in _LINE_ENDS})


def shown(event: TokenEvent) -> str:
    """Choose the text to show of an event: its own, or its token id if there is no tokenizer."""
    if event.request.detokenizer is not None:
        return event.text
    return "" if event.token is None else f"{event.token} "


def _counts(output: Output) -> str:
    return f"{len(output.prompt)} + {len(output.tokens)} tokens, {output.finish_reason}"
