"""Run Triton kernels on a CPU: in a process of their own, which interprets them.

``TRITON_INTERPRET`` is read when a kernel's module is imported, and then holds for the process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_hybrid.ops.triton.devices import interpreted, triton_missing

needs_triton = pytest.mark.skipif(triton_missing() is not None, reason=triton_missing() or "")
needs_interpreter = pytest.mark.skipif(
    not interpreted(), reason="TRITON_INTERPRET is not set; test_in_the_interpreter sets it"
)


def run_interpreted(folder: Path, selection: str) -> None:
    """Run the tests of ``folder`` that ``selection`` (pytest's -k) picks; all must pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", selection, folder]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    summary = done.stdout.strip().rpartition("\n")[2]
    print(f"in the interpreter: {summary}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"\d+ passed", summary), summary
    assert "skipped" not in summary, summary
