"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.block_attention.cases import CASES, Inputs, make_inputs
from tests.ops.contract import assert_within_budget
from tests.ops.triton_compile import SHARED_LIMITS, Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.block_attention import block_attention, reference

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/block_attention -k triton
CONTRACT = """
    (triton and not triton_invariant and (
        float64 and (odd or a_token) or nothing or more_heads and fp16 or keys_that
    ) or triton_invariant and (float64 and odd_l and bf16 or chunked and invariant-1))
    and not interpreter and not on_a_gpu or any_of_a_tile
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype):
    inputs = make_inputs(CASES[name], dtype=dtype)
    options = {"block_size": inputs.block_size, "scale": inputs.scale}
    exact, oracle = reference.block_attention(inputs.exact()), inputs.fresh()
    moved = [x if x is None else x.cuda() for x in inputs.args()]
    rounded = reference.block_attention(oracle)
    out = block_attention(*moved, **options, impl="triton").cpu()
    assert_within_budget(out, exact, rounded)
    assert torch.equal(moved[3].cpu().view(torch.uint8), oracle.kv.view(torch.uint8))


# (sequences, tokens, dtype)
SHAPES = {
    "Qwen4-Exp decode 1": (1, 1, torch.bfloat16),
    "Qwen4-Exp decode 64": (64, 64, torch.bfloat16),
    "Qwen4-Exp extend 2048": (4, 2048, torch.bfloat16),
    "Qwen4-Exp decode 64 float32": (64, 64, torch.float32),
}
# (sequences, tokens, dtype, heads)
LATENT_SHAPES = {
    "GLM-5.3 decode 1": (1, 1, torch.bfloat16, 64),
    "GLM-5.3 decode 64": (64, 64, torch.bfloat16, 64),
    "GLM-5.3 decode 64, 32 heads": (64, 64, torch.bfloat16, 32),
    "GLM-5.3 extend 2048": (4, 2048, torch.bfloat16, 64),
    "GLM-5.3 decode 64 float32": (64, 64, torch.float32, 64),
}


@needs_cross_compiler
def test_compiles_without_spills():
    rows = [
        resources_of(launch, target, label)
        for shapes, record in ((SHAPES, record_launches), (LATENT_SHAPES, record_latent_launches))
        for label, shape in shapes.items()
        for target in SHARED_LIMITS
        for launch in record(target, *shape).values()
    ]
    for target in SHARED_LIMITS:
        launches = record_launches(target, 64, 64, torch.bfloat16, is_invariant=True)
        label = "Qwen4-Exp of any lengths"
        rows.append(resources_of(launches["_attend_kernel"], target, label))
    launches = record_latent_launches("sm_90", *LATENT_SHAPES["GLM-5.3 extend 2048"], gluon=False)
    rows.append(resources_of(launches["_attend_kernel"], "sm_90", "GLM-5.3 of other Gluon"))
    table = Path(__file__).with_name("resources.txt")
    assert_all_fit(rows, table, may_spill={"hopper_shared": 24})  # 1.05x as fast, on an H200


def record_launches(
    target: str,
    num_seqs: int,
    num_tokens: int,
    dtype: torch.dtype,
    *,
    is_invariant: bool = False,
) -> dict[str, Launch]:
    from torch_hybrid.ops.block_attention import _triton

    index = torch.empty(num_tokens + 1, dtype=torch.int32, device="meta")
    q = torch.empty(num_tokens, 24, 256, dtype=dtype, device="meta")
    with launches_on(target) as launches:
        _triton.block_attention(
            Inputs(
                q=q,
                k=q[:, :2],
                v=q[:, :2],
                kv=q.new_empty(2, 4096, 16, 2, 256),
                blocks=torch.empty(num_tokens, 512, dtype=torch.int32, device="meta"),
                cu_seqlens=index[: num_seqs + 1],
                seq_lens=index[:num_seqs],
                page_table=torch.empty(num_seqs, 2048, dtype=torch.int32, device="meta"),
                slot_mapping=index[:num_tokens],
                block_size=4,
                scale=1 / 16,
            ),
            is_invariant=is_invariant,
        )
    return launches


def record_latent_launches(
    target: str,
    num_seqs: int,
    num_tokens: int,
    dtype: torch.dtype,
    num_heads: int,
    *,
    gluon: bool = True,
) -> dict[str, Launch]:
    from torch_hybrid.ops.block_attention import _triton

    index = torch.empty(num_tokens + 1, dtype=torch.int32, device="meta")
    q = torch.empty(num_tokens, num_heads, 512, dtype=dtype, device="meta")
    with launches_on(target, gluon=gluon) as launches:
        _triton.block_attention(
            Inputs(
                q=q,
                k=q[:, 0],
                v=None,
                kv=q.new_empty(4096, 16, 512),
                blocks=torch.empty(num_tokens, 128, dtype=torch.int32, device="meta"),
                cu_seqlens=index[: num_seqs + 1],
                seq_lens=index[:num_seqs],
                page_table=torch.empty(num_seqs, 2048, dtype=torch.int32, device="meta"),
                slot_mapping=index[:num_tokens],
                block_size=16,
                scale=1 / 16,
            )
        )
    return launches
