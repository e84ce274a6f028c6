"""Every example runs as it is shown, and checks what it claims."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTED = {
    "add_an_implementation": "einsum agrees with torch",
    "capture_your_own_loop": "buckets 4, 2, 8",
    "export_decode_step": "packaged, without a compiler, against eager",
    "overlap_two_processes": "of the time in flight was hidden",
    "own_module": "one piece, eager, against two pieces, compiled",
    "runner_by_hand": "chunks against one piece",
    "serve_checkpoint": "length after",
    "write_a_pass": "with the pass and without: 0.0e+00",
}
TRAINING = "train_recall"  # minutes long; tests/demo runs a short training


def test_every_example_is_run():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*PRINTED, TRAINING}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_example(name: str):
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout
