"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.contract import assert_within_budget
from tests.ops.gated_pooling.cases import CASES, Inputs, make_inputs
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_shapes_fit
from torch_hybrid.ops.gated_pooling import gated_pooling, reference

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/gated_pooling -k triton
CONTRACT = """
    triton and (float64 and (odd or a_token) or segments or out_of_range)
    and not interpreter and not on_a_gpu
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype):
    inputs = make_inputs(CASES[name], dtype=dtype, padding=(3, 2))
    exact = reference.gated_pooling(inputs.exact())
    oracle, moved = inputs.fresh(), [x.cuda() for x in inputs.args()]
    expected = reference.gated_pooling(oracle)
    assert_within_budget(gated_pooling(*moved, impl="triton").cpu(), exact, expected)
    torch.testing.assert_close(moved[3].cpu(), oracle.state, atol=0, rtol=0, equal_nan=True)


# (sequences, tokens, dtype)
SHAPES = {
    "GLM-5.3 decode 64": (64, 64, torch.bfloat16),
    "GLM-5.3 extend 2048": (4, 2048, torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills():
    assert_shapes_fit(Path(__file__).parent, SHAPES, record_launches)


def record_launches(
    target: str, num_seqs: int, num_tokens: int, dtype: torch.dtype
) -> dict[str, Launch]:
    from torch_hybrid.ops.gated_pooling import _triton

    index = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    keys = torch.empty(num_tokens, 128, dtype=dtype, device="meta")
    with launches_on(target) as launches:
        _triton.gated_pooling(
            Inputs(
                keys=keys,
                gates=keys,
                bias=keys.new_empty(16, 128),
                state=keys.new_empty(num_seqs + 1, 15, 2, 128),
                cu_seqlens=index,
                seq_lens=index[1:],
                initial_indices=index[1:],
                state_indices=index[1:],
            )
        )
    return launches
