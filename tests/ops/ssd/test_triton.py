"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.recurrent_triton import check, check_captured
from tests.ops.ssd.cases import CASES, Case, Inputs, make_inputs, skip_beyond
from tests.ops.triton_compile import (
    Launch,
    launches_on,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_at
from torch_hybrid.ops.ssd import ssd
from torch_hybrid.ops.ssd.op import Ssd
from torch_hybrid.ops.ssd.reference import ssd_reference

# What of the contract the interpreter can do in seconds; it takes milliseconds a token and head.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/ssd -k triton
CONTRACT = """
    recurrent-triton and (
        exact and (one_token or decode or three_heads or odd_dims or odd_lightning)
    ) or test_triton.py and in_interpreter
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_interpreter
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(1, 3), num_groups=1, num_heads=2, k_dim=128, v_dim=64),
        Case(lengths=(2,), num_groups=1, num_heads=1, k_dim=256, v_dim=64),
        Case(lengths=(2,), num_groups=1, num_heads=1, k_dim=96, v_dim=96, lightning=True),
    ],
    ids=["bamba", "falcon_h1", "minimax"],
)
def test_blocks_of_a_head_in_interpreter(case: Case):
    check(run, ssd_reference, make_inputs(case, torch.bfloat16), "cpu")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    skip_beyond(case, dtype)
    check(run, ssd_reference, make_inputs(case, dtype))


@needs_cuda
def test_a_captured_graph_serves_other_lengths():
    """Three sequences of a bucket of eight tokens, replayed with other lengths and slots."""
    first = make_inputs(Case(lengths=(1, 1, 1), num_padding_tokens=5))
    other = make_inputs(Case(lengths=(4, 0, 3), num_padding_tokens=1), seed=1)
    check_captured(run, ssd_reference, first, [other])


def run(inputs: Inputs) -> Tensor:
    return ssd(*inputs.args(), **inputs.options(), impl="recurrent_triton")


# (sequences, tokens, groups, heads, K, V, args, dtype)
SHAPES = {
    "Bamba decode 64": (64, 64, 1, 128, 128, 64, "dt D", torch.bfloat16),
    "Bamba decode 64 float32": (64, 64, 1, 128, 128, 64, "dt D", torch.float32),
    "Bamba 4 tokens each": (64, 256, 1, 128, 128, 64, "dt D", torch.bfloat16),
    "Falcon-H1 decode 64": (64, 64, 1, 24, 256, 64, "dt D", torch.bfloat16),
    "Nemotron-H decode 64": (64, 64, 8, 128, 128, 64, "dt D", torch.bfloat16),
    "MiniMax-01 decode 64": (64, 64, 64, 64, 96, 96, "", torch.bfloat16),
    "Ring-2.5 decode 64": (64, 64, 32, 32, 128, 128, "", torch.bfloat16),
    "xLSTM-7b decode 64": (64, 64, 8, 8, 256, 528, "dt", torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = resources_at(SHAPES, record_launches)
    assert_all_fit(rows, Path(__file__).with_name("resources_recurrent.txt"))


def record_launches(target: str, *shape: Any) -> dict[str, Launch]:
    """Note what the launcher launches."""
    from torch_hybrid.ops.ssd import _triton

    with launches_on(target) as launches:
        _triton.recurrent_ssd(on_meta(*shape))
    return launches


def on_meta(
    num_seqs: int,
    num_tokens: int,
    num_groups: int,
    num_heads: int,
    k_dim: int,
    v_dim: int,
    args: str,
    dtype: torch.dtype,
) -> Ssd:
    """Make inputs without memory, whose v, k and q are slices of one projection; ``args`` names
    those of dt and D that are given."""
    k_size, v_size = num_groups * k_dim, num_heads * v_dim
    vkq = torch.empty(num_tokens, 2 * k_size + v_size, dtype=dtype, device="meta")
    v, k, q = vkq.split([v_size, k_size, k_size], 1)
    per_head = torch.empty(num_tokens, num_heads, device="meta")
    indices = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    return Ssd(
        q=q.unflatten(1, (num_groups, k_dim)),
        k=k.unflatten(1, (num_groups, k_dim)),
        v=v.unflatten(1, (num_heads, v_dim)),
        g=per_head if "dt" in args else per_head[:1].expand_as(per_head),
        dt=per_head if "dt" in args else None,
        D=per_head[0] if "D" in args else None,
        state=torch.empty(num_seqs + 1, num_heads, v_dim, k_dim, device="meta"),
        cu_seqlens=indices,
        initial_indices=indices[1:],
        state_indices=indices[1:],
        scale=1.0,
        impl="triton",
    )
