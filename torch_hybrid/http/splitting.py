"""Split of an output into thoughts, content and tool calls, whole or as its text comes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from torch_hybrid.http.tools import THOUGHTS, Called, Format, Schemas, UnfinishedError
from torch_hybrid.serving.detokenizer import Detokenizer, Tokenizer
from torch_hybrid.serving.request import Request

Thinking = Literal["open", "possible", "none"]  # where an output begins


def thinking_of(template: str, prompt_end: str, form: Format | None = None) -> Thinking:
    """Tell whether an output begins within thoughts.

    Args:
        template: the chat template.
        prompt_end: text of the prompt's last tokens, which may open or close thoughts.
        form: format of calls; None where there can be none.
    """
    begin, end = THOUGHTS if form is None else form.thoughts
    can_think = end in template or (form is not None and form.is_always)
    if not can_think or prompt_end.rstrip().endswith(end):
        return "none"
    return "open" if prompt_end.rstrip().endswith(begin) else "possible"


@dataclass(slots=True)
class Said:
    """Parts of an output that have become final."""

    reasoning: str = ""
    content: str = ""
    calls: list[Called] = field(default_factory=list)


class Splitter:
    """Split of one output; the parts of its pieces add up to those of the whole.

    Text that may begin a border is held back. A block that is no valid call is content.

    Args:
        thinking: where the output begins.
        form: format of calls; None reads none.
        schemas: schemas of arguments.
        most_calls: calls after these are left out; None is all.
    """

    def __init__(
        self,
        thinking: Thinking,
        form: Format | None,
        schemas: Schemas,
        most_calls: int | None = None,
    ) -> None:
        self._form, self._schemas, self._left = form, schemas, most_calls
        self._think, self._end_think = THOUGHTS if form is None else form.thoughts
        begin: dict[Thinking, str] = {"open": "thoughts", "possible": "start", "none": "content"}
        self._state = begin[thinking]
        self._held = ""
        self._is_fresh = thinking == "open"  # space after a border is left out

    def feed(self, text: str, *, ends: bool = False) -> Said:
        """Take text; return what has become final, which is all where the output ends."""
        self._held += text
        said = Said()
        steps = {
            "start": self._start,
            "thoughts": self._text,
            "content": self._text,
            "call": self._call,
        }
        while steps[self._state](said, ends):
            pass
        return said

    def _go(self, state: str, rest: str, *, is_fresh: bool = True) -> bool:
        self._state, self._held, self._is_fresh = state, rest, is_fresh
        return True

    def _start(self, _: Said, ends: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(self._think):
            return self._go("thoughts", text[len(self._think) :])
        if self._think.startswith(text) and not ends:
            return False
        return self._go("content", self._held, is_fresh=False)

    def _text(self, said: Said, ends: bool) -> bool:
        """Give text up to the border after it; a special token of calls ends thoughts too."""
        thinks = self._state == "thoughts"
        begins = [] if self._form is None else [self._form.begin]
        if thinks:
            begins = [self._end_think, *(begin for begin in begins if begin.startswith("<|"))]
        if self._is_fresh:
            self._held = self._held.lstrip()
            self._is_fresh = not self._held
        found = [(self._held.find(border), border) for border in begins if border in self._held]
        at, border = min(found, default=(-1, ""))
        if found:
            given = self._held[:at].rstrip()
        else:
            certain = [self._held if ends else _certain(self._held, border) for border in begins]
            given = min(certain, key=len, default=self._held)
        if thinks:
            said.reasoning += given
        else:
            said.content += given
        if not found:
            self._held = self._held[len(given) :]
            return False
        return self._go(
            "content" if border == self._end_think else "call", self._held[at + len(border) :]
        )

    def _call(self, said: Said, ends: bool) -> bool:
        """Read a block of calls when its end has come."""
        assert self._form is not None
        form, at = self._form, -1
        while form.end and (at := self._held.find(form.end, at + 1)) >= 0:
            try:
                self._read(said, self._held[:at])
            except UnfinishedError:
                continue
            except ValueError:
                said.content += form.begin + self._held[: at + len(form.end)]
                return self._go("content", self._held[at + len(form.end) :], is_fresh=False)
            return self._go("content", self._held[at + len(form.end) :])
        if not ends:
            return False
        try:
            self._read(said, self._held)
        except ValueError:
            said.content += form.begin + self._held
        self._held = ""
        return False

    def _read(self, said: Said, block: str) -> None:
        assert self._form is not None
        calls = self._form.read(block, self._schemas)
        if not calls and not self._form.is_always:
            raise ValueError(f"a block must have a call, got {block!r}")
        try:  # infinities, lone surrogates, and literals of Python alone cannot be sent
            json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, RecursionError) as error:
            raise ValueError(f"arguments must be of JSON's types: {error}") from None
        said.calls += calls[: self._left]
        self._left = None if self._left is None else max(0, self._left - len(calls))


def _certain(text: str, border: str) -> str:
    """Leave out the end of a text that may begin a border, and the space before that."""
    longest = min(len(border) - 1, len(text))
    num_begun = next((n for n in range(longest, 0, -1) if text.endswith(border[:n])), 0)
    return text[: len(text) - num_begun].rstrip()


def show_special(first: Request) -> None:
    """Let the texts of a request and its samples have special tokens: some are borders."""
    for sample in first.samples:
        assert sample.tokenizer is not None
        stop = sample.sampling.stop
        sample.detokenizer = Detokenizer(sample.tokenizer, stop, hides_special=False)


def hides_borders(tokenizer: Tokenizer, form: Format | None) -> bool:
    """Tell whether special tokens of the borders of thoughts or calls are in no text."""
    borders = [THOUGHTS[1]] if form is None else [form.thoughts[1], form.begin]
    ids = [list(tokenizer.encode(border)) for border in borders]
    texts = [
        [tokenizer.decode(each, skip_special_tokens=skips) for each in ids]
        for skips in (False, True)
    ]
    return texts[0] != texts[1]
