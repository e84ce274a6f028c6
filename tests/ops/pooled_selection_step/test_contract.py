"""The contract of pooled_selection_step, held by every implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.errors import error_text
from tests.ops.contract import assert_within_budget, impl_fixture
from tests.ops.pooled_selection_step.cases import CASES, SMALL, Case, Inputs, make_inputs
from tests.ops.triton_interpreter import needs_interpreter
from torch_hybrid.ops.composed import COMPOSED
from torch_hybrid.ops.pooled_selection_step import pooled_selection_step, reference
from torch_hybrid.ops.pooled_selection_step.op import IMPLEMENTATIONS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STATE, BLOCK_KEYS = 5, 6  # of the arguments
impl = impl_fixture(IMPLEMENTATIONS)


def step(inputs: Inputs, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks, and both pools afterwards."""
    args = inputs.args()
    chosen = pooled_selection_step(*args, top_k=inputs.top_k, impl=impl)
    return chosen, args[STATE], args[BLOCK_KEYS]


def expected_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    oracle = inputs.fresh()
    return reference.pooled_selection_step(oracle), oracle.state, oracle.block_keys


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_is_the_reference(impl: str, name: str, dtype: str):
    case = CASES[name]
    inputs = make_inputs(case, dtype=DTYPES[dtype], padding=(3, 2))
    assert_same(step(inputs, impl), expected_of(inputs))


def test_pooled_keys_round_once(impl: str):
    case = CASES["glm5_next"]
    inputs = make_inputs(case, dtype=torch.float16, alike=False)
    _, state, pool = step(inputs, impl)
    _, expected_state, expected = expected_of(inputs)
    is_written = expected.isfinite() & (expected != inputs.block_keys)
    assert is_written.any()
    _, _, exact_pool = expected_of(inputs.exact())
    pools = (pool, exact_pool, expected)
    assert_within_budget(*(each[is_written] for each in pools))
    assert_same((state, pool[~is_written]), (expected_state, expected[~is_written]))


def test_a_text_step_by_step(impl: str):
    """Each step goes on from what the one before left; a fork of it leaves another slot alone."""
    case = replace(SMALL, lengths=((1, 1),))
    lengths = range(1, 30)
    table = torch.arange(1, 4).int()[None]
    kept, expected = (
        [torch.full((3, 3, 2, 32), torch.nan).bfloat16(), torch.zeros(4, 4, 32).bfloat16()]
        for _ in range(2)
    )
    for length in lengths:
        slot = torch.tensor([1 + length // 4 % 2]).int()
        before = torch.tensor([1 + (length - 1) // 4 % 2]).int()
        inputs = replace(
            make_inputs(case),
            keys=torch.full((1, 32), float(length)).bfloat16(),
            gates=torch.zeros(1, 32).bfloat16(),
            bias=torch.zeros(4, 32).bfloat16(),
            seq_lens=torch.tensor([length]).int(),
            page_table=table,
            slot_mapping=torch.tensor([15 + length]).int(),
            initial_indices=before * (length > 1),
            state_indices=slot,
        )
        steps = []
        for run, (state, block_keys) in ((step, kept), (None, expected)):
            given = replace(inputs, state=state, block_keys=block_keys)
            steps.append(run(given, impl) if run else expected_of(given))
        assert_same(*steps)
        kept, expected = ([state, pool] for _, state, pool in steps)
    assert kept[1][1:3].flatten(0, 1)[6].isfinite().all()


@needs_interpreter
@pytest.mark.parametrize("most_programs", [1, 16])
def test_triton_takes_several_tiles(monkeypatch: pytest.MonkeyPatch, most_programs: int):
    """As where sequences are many: one program of a sequence has all tiles, or every other."""
    from torch_hybrid.ops.pooled_selection_step import _triton

    monkeypatch.setattr(_triton, "_PROGRAMS", most_programs)
    case = replace(CASES["odd"], lengths=((1, 420), (1, 421), (1, 389), (1, 384)))
    inputs = make_inputs(case)
    oracle, others = inputs.fresh(), inputs.args()
    expected = reference.pooled_selection_step(oracle)
    chosen = pooled_selection_step(*others, top_k=case.top_k, impl="triton")
    assert torch.equal(chosen, expected)
    for left, pool in zip(others[5:7], (oracle.state, oracle.block_keys), strict=True):
        torch.testing.assert_close(left, pool, atol=0, rtol=0, equal_nan=True)


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, case: Case = SMALL, top_k: int = 3, **changes: Tensor) -> str:
    inputs = replace(make_inputs(case), **changes)
    return error_text(ValueError, pooled_selection_step, *inputs.args(), top_k=top_k, impl=impl)


def test_errors():
    good = make_inputs(SMALL)
    told = failing("torch", bias=good.bias[:3])
    assert told == "state must have shape [11, 2, 2, 32], got [11, 3, 2, 32]"
    assert failing("torch", top_k=0) == "top_k must be at least 1, got 0"


def test_several_tokens_are_refused(impl: str):
    if impl != COMPOSED:
        told = failing(impl, replace(SMALL, lengths=((1, 23), (2, 28), (1, 1))))
        assert told == "each sequence must have one token or none, got lengths [1, 2, 1]"
