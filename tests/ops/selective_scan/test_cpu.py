"""What is peculiar to the C++ kernel: threads share channels, and both forms are one walk."""

from __future__ import annotations

import pytest
import torch

from tests.ops.contract import assert_same_bits, skip_reason
from tests.ops.selective_scan.cases import Case, make_inputs
from torch_hybrid.ops.selective_scan import selective_scan
from torch_hybrid.ops.selective_scan.op import IMPLEMENTATIONS

_WHY_NOT = skip_reason(IMPLEMENTATIONS["recurrent_cpp"], "cpu")
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "it runs here")


@pytest.mark.usefixtures("own_num_threads")
@pytest.mark.parametrize("impl", ["recurrent_cpp", "chunk_cpp"])
def test_the_number_of_threads_changes_no_bit(impl: str):
    """Three blocks of channels, the last of each group cut short, by up to sixteen threads."""
    inputs = make_inputs(Case(lengths=(20, 33, 1, 0, 17), channels=208, num_groups=2))
    expected = inputs.copy()
    torch.set_num_threads(1)
    out = selective_scan(*expected.args(), impl="recurrent_cpp")
    for num_threads in (2, 4, 16):
        torch.set_num_threads(num_threads)
        actual = inputs.copy()
        assert torch.equal(selective_scan(*actual.args(), impl=impl), out)
        assert_same_bits(actual.state, expected.state)


@pytest.mark.parametrize("state_dim", [16, 7])
def test_where_a_sequence_is_cut_changes_no_bit(state_dim: int):
    inputs = make_inputs(Case(lengths=(60,), state_dim=state_dim))
    cut = inputs.copy()
    out = selective_scan(*inputs.args(), impl="chunk_cpp")
    pieces = []
    for piece in (slice(0, 1), slice(1, 38), slice(38, 60)):
        x, dt, B, C, z = cut.tokens(piece).values()
        offsets = torch.tensor([0, len(x)], dtype=torch.int32)
        index = (offsets, cut.initial_indices, cut.state_indices)
        rest = (cut.A_log, cut.D, cut.state, *index)
        pieces.append(selective_scan(x, dt, B, C, z, *rest, impl="chunk_cpp"))
    assert torch.equal(torch.cat(pieces), out)
    assert_same_bits(cut.state, inputs.state)
