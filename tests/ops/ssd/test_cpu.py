"""What is peculiar to the C++ kernels: how they deal work out to threads."""

from __future__ import annotations

import pytest
import torch

from tests.ops.contract import skip_reason
from tests.ops.ssd.cases import Case, make_inputs
from torch_hybrid.ops.ssd import ssd
from torch_hybrid.ops.ssd.op import IMPLEMENTATIONS

_WHY_NOT = skip_reason(IMPLEMENTATIONS["recurrent_cpp"], "cpu")
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "it runs here")


@pytest.mark.usefixtures("own_num_threads")
@pytest.mark.parametrize("impl", ["recurrent_cpp", "chunk_cpp"])
def test_the_number_of_threads_changes_no_bit(impl: str):
    """Seven heads of a group are dealt out whole, as 4 and 3, in twos and one, and one by one."""
    inputs = make_inputs(Case(lengths=(20, 33, 1, 0, 17), num_groups=1, num_heads=7))
    expected = inputs.copy()
    torch.set_num_threads(1)
    out = ssd(*expected.args(), scale=1.0, impl=impl)
    for num_threads in (2, 4, 16):
        torch.set_num_threads(num_threads)
        actual = inputs.copy()
        assert torch.equal(ssd(*actual.args(), scale=1.0, impl=impl), out)
        torch.testing.assert_close(actual.state, expected.state, rtol=0, atol=0, equal_nan=True)


def test_denormals_are_zeros_within_the_chunk_form_alone():
    """Decays of e^-90 pass through them. What else the thread computes keeps its own."""
    inputs = make_inputs(Case(lengths=(40,)))
    inputs.g.fill_(-90.0)
    actual, expected = inputs.copy(), inputs.copy()
    out = ssd(*actual.args(), scale=1.0, impl="chunk_cpp")
    torch.testing.assert_close(out, ssd(*expected.args(), scale=1.0, impl="chunk_torch"))
    assert torch.tensor([1e-30]) * 1e-10 != 0
