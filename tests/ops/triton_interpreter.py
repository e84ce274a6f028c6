"""Run Triton kernels on a CPU: in a process of their own, which interprets them.

``TRITON_INTERPRET`` is read when a kernel's module is imported, and then holds for the process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_hybrid.ops.triton.devices import triton_missing

INTERPRETED = "passed in the interpreter"
needs_triton = pytest.mark.skipif(triton_missing() is not None, reason=triton_missing() or "")
needs_interpreter = pytest.mark.interpreter


def run_interpreted(
    record_property: Callable[[str, object], None], folder: Path, selection: str
) -> None:
    """Run the tests of ``folder`` that ``selection`` (pytest's -k) picks; all must pass.

    How many they are is recorded: the summary of the whole run counts them.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", selection, folder]
    # Options of the run that this is part of are not for it: the last line is read here.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        command,
        env=env | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    summary = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.match(r"(\d+) passed", summary)
    assert passed is not None, summary
    record_property(INTERPRETED, int(passed[1]))
    assert "skipped" not in summary, summary
