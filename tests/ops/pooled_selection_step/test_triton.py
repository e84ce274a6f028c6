"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.pooled_selection_step.cases import CASES, Inputs, make_inputs
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_shapes_fit
from torch_hybrid.ops.pooled_selection_step import pooled_selection_step, reference

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/pooled_selection_step -k triton
CONTRACT = """
    triton and (reference and (odd or a_token or glm5_next and bf16 or takes_all and fp16)
    or round_once or step_by_step or out_of_range or several_tiles)
    and not in_the_interpreter and not on_a_gpu
"""
test_in_the_interpreter = interprets(CONTRACT)


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


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype):
    case, inputs = CASES[name], make_inputs(CASES[name], dtype=dtype, padding=(3, 2))
    oracle = inputs.fresh()
    moved = [x if x is None else x.cuda() for x in inputs.args()]
    expected = reference.pooled_selection_step(oracle)
    chosen = pooled_selection_step(*moved, top_k=case.top_k, impl="triton")
    assert torch.equal(chosen.cpu(), expected)
    for left, pool in zip(moved[5:7], (oracle.state, oracle.block_keys), strict=True):
        torch.testing.assert_close(left.cpu(), pool, atol=0, rtol=0, equal_nan=True)


# (sequences, tokens that a page table can name)
SHAPES = {
    "GLM-5.3 decode 1": (1, 8192),
    "GLM-5.3 decode 64": (64, 32768),
}


@needs_cross_compiler
def test_compiles_without_spills():
    assert_shapes_fit(Path(__file__).parent, SHAPES, record_launches)


def record_launches(target: str, num_seqs: int, num_kept: int) -> dict[str, Launch]:
    from torch_hybrid.ops.pooled_selection_step import _triton

    index = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    q = torch.empty(num_seqs, 32, 128, dtype=torch.bfloat16, device="meta")
    with launches_on(target) as launches:
        _triton.pooled_selection_step(
            Inputs(
                q=q,
                keys=q[:, 0],
                gates=q[:, 1],
                bias=q.new_empty(16, 128),
                weights=q.new_empty(num_seqs, 32, dtype=torch.float32),
                state=q.new_empty(num_seqs + 1, 15, 2, 128),
                block_keys=q.new_empty(4096, 4, 128),
                cu_seqlens=index,
                seq_lens=index[1:],
                page_table=torch.empty(num_seqs, num_kept // 64, dtype=torch.int32, device="meta"),
                slot_mapping=index[1:],
                initial_indices=index[1:],
                state_indices=index[1:],
                top_k=128,
            )
        )
    return launches
