"""The contract of previous_rows, held by every implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.contract import impl_fixture
from tests.ops.pages import offsets
from tests.ops.previous_rows.cases import CASES, NUM_KEPT, make_inputs
from torch_hybrid.ops.previous_rows import previous_rows, reference
from torch_hybrid.ops.previous_rows.op import IMPLEMENTATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
impl = impl_fixture(IMPLEMENTATIONS)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_is_the_reference_bit_for_bit(impl: str, name: str, dtype: str):
    """Places that are not written keep their bits, the null slot's too."""
    inputs = make_inputs(CASES[name], dtype=DTYPES[dtype], padding=(3, 2))
    oracle, args = inputs.fresh(), inputs.args()
    expected = reference.previous_rows(oracle)
    out = previous_rows(*args, impl=impl)
    assert bits(out) == bits(expected)
    assert [bits(pool) for pool in args[2:4]] == [bits(oracle.kept), bits(oracle.kept_tokens)]
    assert out.isfinite().all()


def test_steps_are_the_whole(impl: str):
    """A sequence in steps of every kind: what is before each token that is held is the token before
    it, and its last tokens are kept, whatever was drafted beside them."""
    rng = torch.Generator().manual_seed(0)
    x, tokens = torch.randn(40, 5, generator=rng), torch.arange(40)
    kept = torch.full((3, NUM_KEPT, 5), torch.nan)
    kept_tokens = torch.full((3, NUM_KEPT), -5)
    slot, held = torch.tensor([2]).int(), 0
    # New tokens, drafts after them, and how many of those are right.
    for new, drafts, right in ((7, 0, 0), (1, 3, 2), (1, 3, 0), (1, 2, 2), (6, 0, 0), (1, 4, 3)):
        wrong = torch.randn(drafts - right, 5, generator=rng)
        rows = torch.cat([x[held : held + new + right], wrong])
        ids = torch.cat([tokens[held : held + new + right], torch.full((drafts - right,), 99)])
        length = torch.tensor([held + len(rows)]).int()
        initial = slot if held else slot * 0
        index = (offsets([len(rows)]), length, initial, slot)
        out = previous_rows(rows, ids, kept, kept_tokens, *index, impl=impl)
        before = x[held - 1 : held] if held else torch.zeros(1, 5)
        held += new + right
        expected = torch.cat([before, x[held - new - right :]])[: new + right]
        assert torch.equal(out[: new + right], expected)
        last = torch.arange(max(0, held - NUM_KEPT + drafts - right), held)
        assert torch.equal(kept[2, last % NUM_KEPT], x[last])
        assert torch.equal(kept_tokens[2, last % NUM_KEPT], last)


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, **changes: Tensor) -> str:
    args = replace(make_inputs(CASES["verify"]), **changes).args()
    return error_text(ValueError, previous_rows, *args, impl=impl)


def test_error_texts():
    good = make_inputs(CASES["verify"])
    errors = [
        failing("torch", x=good.x.int()),
        failing("torch", kept=good.kept[0]),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
x must be [T, D] of a float dtype, got torch.int32 [15, 24]
kept must be [S, R, D], got [8, 24]""",
    )
