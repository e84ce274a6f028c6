"""What is peculiar to the C++ kernels: how they deal work out to threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.contract import skip_reason
from tests.ops.ssd.cases import Case, make_inputs
from torch_hybrid.ops.ssd import chunk_ssd, recurrent_ssd
from torch_hybrid.ops.ssd.op import RECURRENT_IMPLEMENTATIONS

_WHY_NOT = skip_reason(RECURRENT_IMPLEMENTATIONS["cpp"], "cpu")
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "it runs here")


@pytest.fixture(autouse=True)
def _restore_num_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("op", [recurrent_ssd, chunk_ssd])
def test_the_number_of_threads_changes_no_bit(op):
    """Seven heads of a group are dealt out whole, as 4 and 3, in twos and one, and one by one."""
    inputs = make_inputs(Case(lengths=(20, 33, 1, 0, 17), num_groups=1, num_heads=7))
    expected = inputs.copy()
    torch.set_num_threads(1)
    out = op(*expected.args(), scale=1.0, impl="cpp")
    for num_threads in (2, 4, 16):
        torch.set_num_threads(num_threads)
        actual = inputs.copy()
        assert torch.equal(op(*actual.args(), scale=1.0, impl="cpp"), out)
        torch.testing.assert_close(actual.state, expected.state, rtol=0, atol=0, equal_nan=True)


def test_denormals_are_zeros_within_the_chunk_form_alone():
    """Decays of e^-90 pass through them. What else the thread computes keeps its own."""
    inputs = make_inputs(Case(lengths=(40,)))
    inputs.g.fill_(-90.0)
    actual, expected = inputs.copy(), inputs.copy()
    out = chunk_ssd(*actual.args(), scale=1.0, impl="cpp")
    torch.testing.assert_close(out, chunk_ssd(*expected.args(), scale=1.0, impl="torch"))
    assert torch.tensor([1e-30]) * 1e-10 != 0
