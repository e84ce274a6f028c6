"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.select_blocks.cases import CASES, Inputs, make_inputs
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_shapes_fit
from torch_hybrid.ops.select_blocks import reference, select_blocks

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/select_blocks -k triton
CONTRACT = """
    (triton and not triton_invariant and (
        reference and (odd or a_token or many_blocks and bf16) or glm5_next and bf16 or padding
        or apart and not strided or out_of_range
    ) or triton_invariant and any_call and bf16)
    and not interpreter and not on_a_gpu
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype):
    inputs = make_inputs(CASES[name], dtype=dtype)
    options = {"block_size": inputs.block_size, "top_k": inputs.top_k}
    oracle, moved = inputs.fresh(), on_device(inputs)
    expected = reference.select_blocks(oracle)
    assert torch.equal(select_blocks(*moved, **options, impl="triton").cpu(), expected)
    assert torch.equal(moved[3].cpu().view(torch.uint8), oracle.block_keys.view(torch.uint8))


def on_device(inputs: Inputs) -> list[Tensor | None]:
    return [None if x is None else x.cuda() for x in inputs.args()]


# (sequences, tokens, tokens that a page table can name, dtype)
SHAPES = {
    "Qwen4-Exp decode 64": (64, 64, 32768, torch.bfloat16),
    "Qwen4-Exp extend 2048": (4, 2048, 32768, torch.bfloat16),
    "Qwen4-Exp decode 8 float32": (8, 8, 32768, torch.float32),
}


@needs_cross_compiler
def test_compiles_without_spills():
    assert_shapes_fit(Path(__file__).parent, SHAPES, record_launches)


def record_launches(
    target: str, num_seqs: int, num_tokens: int, num_kept: int, dtype: torch.dtype
) -> dict[str, Launch]:
    from torch_hybrid.ops.select_blocks import _triton

    index = torch.empty(num_tokens + 1, dtype=torch.int32, device="meta")
    projected = torch.empty(num_tokens, 5, 128, dtype=dtype, device="meta")
    with launches_on(target) as launches:
        _triton.select_blocks(
            Inputs(
                q=projected[:, :4],
                keys=projected[:, 4],
                weights=None,
                block_keys=projected.new_empty(4096, 4, 128),
                cu_seqlens=index[: num_seqs + 1],
                seq_lens=index[:num_seqs],
                page_table=torch.empty(num_seqs, num_kept // 16, dtype=torch.int32, device="meta"),
                slot_mapping=index[:num_tokens],
                block_size=4,
                top_k=512,
            )
        )
    return launches
