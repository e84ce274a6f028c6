"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.ngram_embedding.cases import CASES, EOS, Inputs, make_inputs
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_shapes_fit
from torch_hybrid.ops.ngram_embedding import ngram_embedding, reference

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/ngram_embedding -k triton
CONTRACT = """
    triton and (reference and (bigrams or five or decode) and not fp16 or across or out_of_range)
    and not interpreter and not on_a_gpu
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype):
    inputs = make_inputs(CASES[name], dtype=dtype, padding=(3, 2))
    oracle, moved = inputs.fresh(), [x.cuda() for x in inputs.args()]
    expected = reference.ngram_embedding(oracle)
    out = ngram_embedding(*moved, eos=EOS, impl="triton").cpu()
    assert torch.equal(out, expected)
    assert torch.equal(moved[5].cpu(), oracle.history)


# (sequences, tokens, dtype)
SHAPES = {
    "Qwen4-Exp decode 64": (64, 64, torch.bfloat16),
    "Qwen4-Exp extend 2048": (4, 2048, torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills():
    assert_shapes_fit(Path(__file__).parent, SHAPES, record_launches)


def record_launches(
    target: str, num_seqs: int, num_tokens: int, dtype: torch.dtype
) -> dict[str, Launch]:
    from torch_hybrid.ops.ngram_embedding import _triton

    index = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    numbers = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    with launches_on(target) as launches:
        _triton.ngram_embedding(
            Inputs(
                tokens=numbers,
                table=torch.empty(1000, 128, dtype=dtype, device="meta"),
                multipliers=numbers[:3],
                head_sizes=numbers[:16],
                head_offsets=numbers[:16],
                history=numbers.new_empty(num_seqs + 1, 2),
                cu_seqlens=index,
                initial_indices=index[1:],
                state_indices=index[1:],
            )
        )
    return launches
