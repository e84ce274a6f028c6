"""Fixtures of the op contract suites."""

from collections.abc import Iterator

import pytest
import torch


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
