"""Every example runs as it is shown, and checks what it claims."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.processes import FORKSERVER

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTED = {
    "add_an_implementation": "einsum agrees with torch",
    "capture_your_own_loop": "buckets 4, 2, 8",
    "describe_an_image": "the tokens are those of transformers",
    "export_decode_step": "packaged, without a compiler, against eager",
    "overlap_two_processes": "of the time in flight was hidden",
    "own_module": "1, 2 and 5 sequences, as they come: 3 graphs",
    "own_op": "compiled and exported agree with eager",
    "reinforce": "KL of server and trainer: 0.0 in each of",
    "runner_by_hand": "chunks against one piece",
    "serve_checkpoint": "length after",
    "tune_a_hybrid": "recall after 120 steps",
    "write_a_pass": "with the pass and without: 0.0e+00",
}
# Its compile is the first call of a process that has imported no more than it needs: once for every
# graph. Of the others, importing torch and transformers is most of the time, and is done once for
# all.
PROGRAM = "write_a_pass"
STRICTLY = """
import runpy, sys
import torch
torch._dynamo.config.error_on_recompile = True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The code around the kernels takes g++ longer than they do, and headers that are compiled first
# longer than the one file that would take them.
ONE_PACKAGE = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}
TRAINING = "train_recall"  # minutes long; tests/demo runs a short training


def test_every_example_is_run():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*PRINTED, TRAINING}


def run_path(path: Path, output: Path) -> None:
    """What ``python path`` does, in a process that is forked from one with the imports done."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.argv, sys.path[0] = [str(path)], str(path.parent)
    with torch._inductor.config.patch(ONE_PACKAGE):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.slow
def test_program():
    command = [sys.executable, "-c", STRICTLY, str(EXAMPLES / f"{PROGRAM}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert PRINTED[PROGRAM] in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRINTED.keys() - {PROGRAM}))
def test_example(name: str, tmp_path: Path):
    output = tmp_path / "output"
    process = FORKSERVER.Process(target=run_path, args=(EXAMPLES / f"{name}.py", output))
    process.start()
    process.join()
    assert process.exitcode == 0, output.read_text()
    assert PRINTED[name] in output.read_text()
