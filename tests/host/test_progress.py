"""Lines about what takes long, before it begins, and bars on a terminal, which end with it."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.tiny_models import make_hybrid
from torch_hybrid.graphs.compiling.compile import StepBackend
from torch_hybrid.host.progress import LOGGER, bar, tell

SIZES = {"max_seqs": 1, "max_tokens": 64, "kv_tokens": 64}
TOLD = re.compile(r"compiling steps: (\w+) \(about \d+ s, sooner where torch's cache has it\)")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told, as it comes."""
    told: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    monkeypatch.setattr(LOGGER, "handlers", [handler])
    return told


class Terminal(io.StringIO):
    """A stderr that bars are shown on."""

    def isatty(self) -> bool:
        return True


def test_a_line_comes_before_a_step_is_compiled(lines: list[str]):
    """By a runner alone and by an engine, once for each step."""
    told_before: list[list[str]] = []
    with run_as_traced():
        traced = StepBackend._compile

        def compile(*args: object) -> object:
            told_before.append([m[1] for m in map(TOLD.fullmatch, lines) if m])
            return traced(*args)

        with mock.patch.object(StepBackend, "_compile", compile):
            engine = th.Engine(th.Runner(make_hybrid(), **SIZES))
            assert not told_before
            for _ in range(2):
                list(engine.generate([[1, 2, 3]], th.Sampling(max_new_tokens=3)))
    assert told_before == [["extend"], ["extend", "decode"]]


def test_an_uncompiled_runner_says_nothing(lines: list[str]):
    runner = th.Runner(make_hybrid(), **SIZES, compile=False)
    runner.extend(runner.new_sequences(1), [[1, 2]])
    assert [line for line in lines if not line.startswith("building C++ kernels")] == []


@contextmanager
def silenced() -> Iterator[None]:
    before = LOGGER.level
    LOGGER.setLevel("WARNING")
    try:
        yield
    finally:
        LOGGER.setLevel(before)


def test_one_setting_silences_lines_and_bars(monkeypatch: pytest.MonkeyPatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with silenced(), bar("compiling"):
        tell("compiling")
    assert shown.getvalue() == ""
    tell("compiling")
    assert shown.getvalue() == "torch_hybrid: compiling\n"


def test_bars_are_on_a_terminal_alone_and_end(monkeypatch: pytest.MonkeyPatch):
    for stderr, is_shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")
        with bar("one", total=2) as advance, bar("two"):
            advance(1, "one more")
            time.sleep(0.3)  # it is drawn ten times in a second
        assert ("one more" in stderr.getvalue()) == is_shown
        assert ("1/2" in stderr.getvalue()) == is_shown
        if is_shown:
            assert stderr.getvalue().endswith("\x1b[2K\x1b[?25h\r"), "it is erased, with a cursor"


def test_without_rich_there_are_lines_and_no_bars(monkeypatch: pytest.MonkeyPatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with bar("compiling", total=1) as advance:
        tell("compiling")
        advance(1, "done")
    assert shown.getvalue() == "torch_hybrid: compiling\n"


SCRIPT = """
    import sys, time
    from torch_hybrid.host.progress import bar, tell
    tell("begins")
    with bar("waiting"):
        time.sleep(0.3)
    print("5 17", end="", flush=True)
"""


def test_what_a_pipe_and_a_terminal_see():
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("5 17", "torch_hybrid: begins\n")
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as program:
        os.close(theirs)
        seen = b""
        with open(ours, "rb", buffering=0) as terminal:
            try:
                while part := terminal.read(4096):
                    seen += part
            except OSError:  # the other end is closed
                pass
    assert program.returncode == 0
    assert seen.startswith(b"torch_hybrid: begins\r\n")
    assert b"waiting" in seen
    assert seen.endswith(b"5 17")
