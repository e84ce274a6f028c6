"""The contract of previous_rows, held by every implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.ops.contract import assert_traces_once, impls_on, pool_clones, skip_reason
from tests.ops.pages import offsets
from tests.ops.previous_rows.cases import CASES, Case, make_inputs
from torch_hybrid.ops.previous_rows import previous_rows, reference
from torch_hybrid.ops.previous_rows.op import IMPLEMENTATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@pytest.fixture(params=impls_on("cpu", IMPLEMENTATIONS))
def impl(request: pytest.FixtureRequest) -> str:
    if reason := skip_reason(IMPLEMENTATIONS[request.param], "cpu"):
        pytest.skip(reason)
    return request.param


def bits(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_is_the_reference_bit_for_bit(impl: str, name: str, dtype: str):
    """Slots that are not written keep their bits, the null one too."""
    inputs = make_inputs(CASES[name], dtype=DTYPES[dtype], padding=(3, 2))
    expected_args, args = inputs.args(), inputs.args()
    expected = reference.previous_rows(*expected_args)
    out = previous_rows(*args, impl=impl)
    assert bits(out) == bits(expected)
    assert [bits(pool) for pool in args[1:3]] == [bits(pool) for pool in expected_args[1:3]]
    assert out.isfinite().all()


def test_steps_are_the_whole(impl: str):
    """A sequence in steps of every kind: what is before each token that is held is the token before
    it, whatever was drafted beside it."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=rng)
    last, records = torch.full((3, 5), torch.nan), torch.full((3, 3, 5), torch.nan)
    slot, held, accepted = torch.tensor([2]).int(), 0, 0

    def step(rows: Tensor, counts: int | None) -> Tensor:
        given = None if counts is None else torch.tensor([counts]).int()
        initial = slot if held else slot * 0
        return previous_rows(
            rows, last, records, offsets([len(rows)]), initial, slot, given, impl=impl
        )

    # Tokens that are certain, drafts, and how many of those are accepted; None: no drafts.
    for certain, drafts, right in (
        (7, None, 0),
        (1, 3, 2),
        (1, 3, 0),
        (1, 2, 2),
        (0, 0, 0),
        (6, None, 0),
    ):
        wrong = torch.randn(3, 5, generator=rng)
        new = x[held : held + certain]
        if drafts is None:
            out = step(new, None)
        else:
            tried = torch.cat([x[held + certain :][:right], wrong])[:drafts]
            out = step(torch.cat([new, tried]), accepted)
        before = x[held - 1 : held] if held else torch.zeros(1, 5)
        assert torch.equal(out[: certain + right], torch.cat([before, x[held:]])[: certain + right])
        held, accepted = held + certain + right, right


# ---- the op as the compiler sees it ----------------------------------------------------------


def test_schema():
    assert_expected_inline(
        str(torch.ops.torch_hybrid.previous_rows.default._schema).replace(", ", ",\n"),
        """\
torch_hybrid::previous_rows(Tensor x,
Tensor(a!) last,
Tensor(b!)? records,
Tensor cu_seqlens,
Tensor initial_indices,
Tensor state_indices,
Tensor? accepted,
*,
str impl) -> Tensor""",
    )


@pytest.mark.parametrize("name", ["mixed", "verify"])
def test_opcheck(impl: str, name: str):
    op = torch.ops.torch_hybrid.previous_rows.default
    torch.library.opcheck(op, make_inputs(CASES[name]).args(), {"impl": impl})


def layers(impl: str) -> Callable[..., Tensor]:
    def step(*args: Any) -> Tensor:
        """Two steps of the same sequences."""
        first = previous_rows(*args, impl=impl)
        return first + previous_rows(args[0] + 1, *args[1:], impl=impl)

    return step


def test_compiles_once(impl: str):
    batches = [
        make_inputs(Case(lengths=lengths, accepted=(1,) * len(lengths))).args()
        for lengths in ((1, 4, 3, 2, 4), (1,) * 7, (3, 2, 4))
    ]
    assert_traces_once(layers(impl), batches)


def test_no_pool_clone(impl: str):
    args = make_inputs(CASES["verify"]).args()
    assert pool_clones(layers(impl), args, [args[1], args[2]]) == []


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, name: str = "verify", **changes: Tensor | None) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is what is compared)
        previous_rows(*replace(make_inputs(CASES[name]), **changes).args(), impl=impl)
    return str(error.value)


def test_error_texts():
    good = make_inputs(CASES["verify"])
    errors = [
        failing("torch", x=good.x.int()),
        failing("torch", last=good.last[:, :3]),
        failing("torch", last=good.last.half()),
        failing("torch", records=None),
        failing("torch", records=good.records[:, :, 1:]),
        failing("torch", accepted=good.accepted[1:]),
        failing("torch", cu_seqlens=good.cu_seqlens.long()),
        failing("tpu"),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
x must be [T, D] of a float dtype, got torch.int32 [11, 24]
last must have shape [15, 24], got [15, 3]
last must have dtype torch.float32, got torch.float16
accepted counts records, and there are none
records must have shape [15, 3, 24], got [15, 3, 23]
accepted must have shape [7], got [6]
cu_seqlens must have dtype torch.int32, got torch.int64
impl must be one of ['cpp', 'torch'], got 'tpu'""",
    )


def test_indices_out_of_range(impl: str):
    good = make_inputs(CASES["verify"])
    errors = [
        failing(impl, accepted=good.accepted + 1),
        failing(impl, initial_indices=good.initial_indices * 0),
        failing(impl, cu_seqlens=offsets([5, 4, 2, 0, 0, 0, 0])),
        failing(impl, cu_seqlens=good.cu_seqlens + 1),
        failing(impl, state_indices=good.state_indices + 90),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
accepted must be within 0 and 3, got [1, 1, 4, 3, 1, 2, 4]
sequence 2 starts from the zero state and has no 3 records
a sequence must have at most 4 tokens, got lengths [5, 4, 2, 0, 0, 0, 0]
cu_seqlens must rise from 0 to at most 11, got [1, 2, 6, 9, 9, 9, 10, 12]
state_indices must be in [0, 15), got 95""",
    )
