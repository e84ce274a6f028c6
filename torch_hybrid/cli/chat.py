"""An interactive conversation: its history is kept, and Ctrl-C ends an answer, not the program."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from torch_hybrid.cli.output import note, print_error, shown, stream_output
from torch_hybrid.cli.prompts import system_message, user_message
from torch_hybrid.errors import CapacityError

if TYPE_CHECKING:
    from torch_hybrid.sampling import Sampling
    from torch_hybrid.serving.engine import Engine
    from torch_hybrid.serving.messages import Message

END_WORDS = ("/exit", "/quit")
PROMPT = "> "
BYTE_ORDER_MARK = "\ufeff"  # some editors write it before the first line of a file


def converse(engine: Engine, sampling: Sampling, system: str | None) -> None:
    """Read messages until Ctrl-D or /exit, and stream an answer to each.

    An answer that Ctrl-C ends stays in the history as far as it came; /new forgets the history.
    """
    if sys.stdin.isatty():
        _edit_lines()
        note("/new begins anew, /exit or Ctrl-D ends; Ctrl-C ends an answer")
    begun = system_message(system)
    history = list(begun)
    while (text := _read()) is not None:
        if text == "/new":
            history = list(begun)
        elif text:
            asked = [*history, user_message(text)]
            answer = _answer(engine, asked, sampling)
            if answer is not None:
                history = [*asked, {"role": "assistant", "content": answer}]


def _edit_lines() -> None:
    """Give ``input`` arrow keys and a history, where this Python was built with readline."""
    try:
        importlib.import_module("readline")
    except ImportError:
        return


def _read() -> str | None:
    """Read the next message; return None at the end of the input."""
    has_prompt = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            text = input(PROMPT if has_prompt else "").removeprefix(BYTE_ORDER_MARK).strip()
        except EOFError:
            if has_prompt:
                print()
            return None
        except KeyboardInterrupt:
            print()
            continue
        return None if text in END_WORDS else text


def _answer(engine: Engine, messages: list[Message], sampling: Sampling) -> str | None:
    """Stream an answer; return its text, or None where there was no answer."""
    try:
        request = engine.submit(messages, sampling, stream=True)
    except (ValueError, CapacityError) as error:
        print_error(f"{error}; /new begins anew")
        return None
    try:
        stream_output(engine, request)
    except KeyboardInterrupt:
        engine.cancel(request)
        print("".join(map(shown, engine.step())), flush=True)  # prints the text that was held back
        note("interrupted")
    output = request.output
    return None if output is None or output.error is not None else output.text
