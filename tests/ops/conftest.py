"""Fixtures of the op contract suites."""

from collections.abc import Iterator

import pytest
import torch

from tests.ops.triton_interpreter import (
    Interpreter,
    interpreter_process,
    make_faster,
    round_products_once,
)
from torch_hybrid.ops.triton.devices import interpreted


@pytest.fixture(autouse=True)
def poison_uninitialized_memory() -> Iterator[None]:
    """Make ``torch.empty`` return NaN, so that reading it cannot go unseen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def own_num_threads() -> Iterator[None]:
    """Restore the number of threads that a test changes."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


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
