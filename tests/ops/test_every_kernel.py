"""``tests.ops.every_kernel`` launches every kernel, without pytest."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ops.kernels import all_kernels


def test_every_kernel_is_launched_for_a_sanitizer() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.ops.every_kernel", "--device", "cpu", "--dry"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(all_kernels())} kernels launched" in done.stdout
