"""Index tensors that a kernel would trust: out of range, or not dense, they are refused by every op
that is registered, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.every_op import CALLS, VALUES, Call, call_of, impls_on_a_host, op_of
from tests.ops.registered import public_ops
from torch_hybrid.ops.core.registration import REGISTERED

GIVEN = {op: call_of(op) for op in CALLS}
# What an error calls an argument, where that is not its name.
CALLED = {"head_sizes": "head 0", "head_offsets": "head 0"}
# Rows may lie apart in it, and ids of experts may have 64 bits.
MAY_LIE_APART, MAY_BE_LONG = (
    {"page_table"},
    {"expert_ids", "token_ids", "head_sizes", "head_offsets", "targets"},
)
READS_THE_END_ALONE = {"store_latents"}  # of offsets


def forms(*, of: Callable[[str, Call], bool]) -> pytest.MarkDecorator:
    """Parametrize a test over the ops that it is about, in each implementation."""
    forms = [
        pytest.param(op, impl, id=f"{op}, {impl}", marks=pytest.mark.skipif(bool(why), reason=why))
        for op, call in GIVEN.items()
        if of(op, call)
        for impl, why in impls_on_a_host(op).items()
    ]
    return pytest.mark.parametrize(("op", "impl"), forms)


def has_indices(op: str, call: Call) -> bool:
    return bool(call.ranges or offsets_of(call))


def changed(index: Tensor, at: int, value: int) -> Tensor:
    """Copy an index and change one element."""
    copy = index.clone()
    copy.view(-1)[at] = value
    return copy


def out_of_range(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Put each index of a call just below its range, and just above it."""
    for name, (least, end) in call.ranges.items():
        yield name, changed(call.given[name], 0, least - 1)
        if end is not None:
            yield name, changed(call.given[name], 0, end)
    for name in offsets_of(call):
        offsets, end = call.given[name], num_rows(call, name) + 1
        yield name, offsets - offsets[-1] - 1
        yield name, changed(offsets, -1, end)


def offsets_of(call: Call) -> list[str]:
    """Name the offsets of sequences among the arguments of a call."""
    return [name for name in call.given if name.startswith("cu_seqlens")]


def num_rows(call: Call, offsets: str) -> int:
    """Count the rows that offsets divide: of the tensor that they are named by, or of the first."""
    named = offsets.removeprefix("cu_seqlens").removeprefix("_") or next(iter(call.given))
    return len(call.given[named])


def failure(call: Call, impl: str, name: str, wrong: Tensor) -> str | None:
    """Say how a call with a wrong argument was not refused before any write; None where it was."""
    tried = call.changed(**{name: wrong})
    before = [pool.clone() for pool in tried.mutated()]
    told = name, CALLED.get(name, name)
    try:
        tried.run(impl)
    except ValueError as error:
        if not any(each in str(error) for each in told):
            return f"{name} is not named by {error}"
    else:
        return f"{name} was accepted: {wrong.tolist()}"
    for pool, held in zip(tried.mutated(), before, strict=True):
        if not torch.equal(pool.view(torch.uint8), held.view(torch.uint8)):
            return f"{name} was refused after a pool was written"
    return None


def failures(call: Call, impl: str, wrong: Iterator[tuple[str, Tensor]]) -> list[str]:
    """Say what ``failure`` says of each wrong argument, where it says something."""
    found = (failure(call, impl, name, tensor) for name, tensor in wrong)
    return [line for line in found if line]


def test_every_op_has_a_call_and_every_index_a_range() -> None:
    assert set(public_ops()) == {op_of(name) for name in CALLS} == set(REGISTERED)
    for op, call in GIVEN.items():
        indices = {n for n in call.integers() if n not in VALUES and n not in offsets_of(call)}
        assert indices == set(call.ranges), op


@forms(of=has_indices)
def test_right_ones_pass(op: str, impl: str) -> None:
    GIVEN[op].changed().run(impl)


@forms(of=has_indices)
def test_those_out_of_range_are_refused(op: str, impl: str) -> None:
    assert failures(GIVEN[op], impl, out_of_range(GIVEN[op])) == []


@forms(of=lambda op, call: bool(offsets_of(call)) and op not in READS_THE_END_ALONE)
def test_offsets_that_fall_are_refused(op: str, impl: str) -> None:
    call = GIVEN[op]
    falling = ((n, changed(call.given[n], 1, num_rows(call, n))) for n in offsets_of(call))
    assert failures(call, impl, falling) == []


@forms(of=lambda op, call: "initial_indices" in call.given)
def test_a_start_from_what_another_sequence_writes_is_refused(op: str, impl: str) -> None:
    call = GIVEN[op]
    first, second, *_ = call.given["cu_seqlens"].diff().nonzero().flatten()
    starts = call.given["initial_indices"].clone()
    starts[first] = call.given["state_indices"][second]
    with pytest.raises(ValueError, match=r"must not start from slot \d+, which sequence \d writes"):
        call.changed(initial_indices=starts).run(impl)


def spread(index: Tensor) -> Tensor:
    return index.repeat_interleave(2, -1)[..., ::2]


def in_64_bits(index: Tensor) -> Tensor:
    return index.long()


@pytest.mark.parametrize(("change", "exempt"), [(spread, MAY_LIE_APART), (in_64_bits, MAY_BE_LONG)])
@pytest.mark.parametrize("op", [op for op, call in GIVEN.items() if has_indices(op, call)])
def test_those_of_another_layout_are_refused(
    op: str, change: Callable[[Tensor], Tensor], exempt: set[str]
) -> None:
    call = GIVEN[op]
    names = {*call.ranges, *offsets_of(call)} - exempt
    wrong: Any = ((name, change(call.given[name])) for name in sorted(names))
    assert failures(call, "torch", wrong) == []
