"""The contract of state_copy, held by every implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.contract import impl_fixture
from tests.ops.state_copy.cases import CASES, indices, make_inputs
from torch_hybrid.ops.state_copy import reference, state_copy
from torch_hybrid.ops.state_copy.op import IMPLEMENTATIONS, StateCopy

impl = impl_fixture(IMPLEMENTATIONS)


def bits(pool: Tensor) -> bytes:
    return pool.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference_bit_for_bit(impl: str, name: str) -> None:
    """Indices that are no dst keep their bits: the null one, which holds NaN, and the last."""
    pools, src, dst = make_inputs(CASES[name])
    expected = [pool.clone() for pool in pools]
    reference.state_copy(StateCopy(expected, src, dst, dim=CASES[name].dim, impl=""))
    state_copy(pools, src, dst, dim=CASES[name].dim, impl=impl)
    assert [bits(pool) for pool in pools] == [bits(pool) for pool in expected]


def test_copies_clears_and_skips(impl: str) -> None:
    pool = torch.arange(5.0) + 1
    state_copy([pool], indices([2, 0, 1]), indices([4, 3, 0]), dim=0, impl=impl)
    assert pool.tolist() == [1, 2, 3, 0, 3]


def test_not_a_number_does_not_survive_a_clear(impl: str) -> None:
    pool = torch.full((2, 4, 300), torch.nan)
    state_copy([pool], indices([0]), indices([3]), dim=1, impl=impl)
    assert torch.equal(pool[:, 3], torch.zeros(2, 300))
    assert pool[:, :3].isnan().all()


def test_a_slot_larger_than_a_piece(impl: str) -> None:
    pools = [torch.randn(4, 1_000_003), torch.randn(4, 3)]
    expected = [pool.clone() for pool in pools]
    reference.state_copy(StateCopy(expected, indices([3, 0]), indices([1, 2]), dim=0, impl=""))
    state_copy(pools, indices([3, 0]), indices([1, 2]), dim=0, impl=impl)
    assert [bits(pool) for pool in pools] == [bits(pool) for pool in expected]


def test_padding_and_order_change_nothing(impl: str) -> None:
    case = CASES["pages"]
    plain, padded = make_inputs(case), make_inputs(replace(case, pairs=case.pairs[::-1]))
    state_copy(*plain, dim=1, impl=impl)
    pools, src, dst = padded
    padding = indices([0] * 5)
    state_copy(pools, torch.cat([src, padding]), torch.cat([dst, padding]), dim=1, impl=impl)
    assert [bits(pool) for pool in pools] == [bits(pool) for pool in plain[0]]


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, src: list[int], dst: list[int], /, **changes: object) -> str:
    arguments = {"pools": [torch.zeros(4, 3), torch.zeros(4, 2)], "dim": 0}
    arguments |= {"src": indices(src), "dst": indices(dst), **changes}
    return error_text(ValueError, state_copy, **arguments, impl=impl)


def test_error_texts() -> None:
    errors = [
        failing("torch", [], [], src=indices([1, 2]).view(1, 2), dst=indices([3, 4]).view(1, 2)),
        failing("torch", [1], [2], dim=2),
        failing("torch", [1], [2], dim=1),
        failing("torch", [1], [2], pools=[torch.zeros(4, 3), torch.zeros(5, 3)]),
        failing("torch", [1], [2], pools=[torch.zeros(3, 4).T]),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
src must have 1 dimension, got 2
dim must be 0 or 1, got 2
pools[1] must have size 3 along dim 1, got shape [4, 2]
pools[1] must have size 4 along dim 0, got shape [5, 3]
pools[0] must be contiguous, got strides (1, 4)""",
    )


def test_bad_pairs(impl: str) -> None:
    errors = [
        failing(impl, [1], [4]),
        failing(impl, [-1], [1]),
        failing(impl, [1, 2], [3, 3]),
        failing(impl, [1, 2], [2, 3]),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
dst must be in [0, 4), got 4
src must be in [0, 4), got -1
dst must not repeat, got 3 twice
src and dst must be disjoint, got [2] in both""",
    )
