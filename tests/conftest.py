"""Settings of every test: fixed seeds, few threads, and no noise from transformers."""

import gc
import os
from collections.abc import Iterator

# Read when torch's thread pool and transformers are first loaded: before any other import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # some hundredths of a trace
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")  # few shapes of a trace recur
os.environ.setdefault("TORCH_HYBRID_STEP_CACHE", "0")  # what compiles a step is tested
os.environ.setdefault("TORCH_WARM_POOL", "0")  # of processes for Triton kernels: none on a CPU
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import hypothesis
import pytest
import torch

from tests.ops.triton_interpreter import (
    INTERPRETED,
    Interpreter,
    interpreter_process,
    make_faster,
    round_products_once,
)
from torch_hybrid.ops.triton.devices import interpreted

# By default everything is looked at for garbage again and again: a tenth of the time of imports,
# of collecting and of traces. ``small_heap`` looks once for each file.
gc.set_threshold(50_000, 20, 100)
# Two at least where there is one process: kernels cut their work by threads.
num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(2 if num_processes == 1 else max(1, (os.cpu_count() or 2) // num_processes))
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same random numbers, whatever ran before it.

    ``torch.manual_seed`` writes out the stack for each kind of device that is not there.
    """
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What earlier files left is looked at once: a model that is loaded collects all garbage, which
    takes a second where the compiler has run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def fast_and_exact_interpreter() -> Iterator[None]:
    """Where this process interprets."""
    with pytest.MonkeyPatch.context() as patch:
        if interpreted():
            make_faster(patch)
            round_products_once(patch)
        yield


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """A process that interprets Triton kernels; started by the first test that asks for it."""
    with interpreter_process() as process:
        yield process


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that compile come first: one that is left to the end keeps a worker alone with it.

    What only a CUDA device or Triton's interpreter could run is left out, so that what is skipped
    is missing here and could be there.
    """
    here = {"cuda": torch.cuda.is_available(), "interpreter": interpreted()}
    missing = [name for name, is_here in here.items() if not is_here]
    elsewhere = {item for item in items if any(map(item.get_closest_marker, missing))}
    config.hook.pytest_deselected(items=list(elsewhere))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    kept = [item for item in items if item not in elsewhere]
    items[:] = sorted(kept, key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what Triton's interpreter ran, in processes of its own."""
    passed = terminalreporter.getreports("passed")
    counts = [n for report in passed for name, n in report.user_properties if name == INTERPRETED]
    if counts:
        terminalreporter.write_line(f"{sum(counts)} tests passed in Triton's interpreter")
