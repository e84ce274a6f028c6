"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.rg_lru.cases import CASES, Case, Inputs
from tests.ops.rg_lru.test_contract import FAMILY
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_shapes_fit
from tests.ops.vector_state_contract import carried, check_on_a_gpu, check_segments

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/rg_lru -k triton
CONTRACT = """
    (triton and not triton_invariant and (exact and not recurrentgemma or nearly_one or segments
    or first_token or not_stored or nothing_to_do) or triton_invariant and segments_are_the_whole)
    and not on_a_gpu and not in_the_interpreter
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    check_on_a_gpu(FAMILY, case, dtype)


@needs_interpreter
def test_segments_in_interpreter(monkeypatch: pytest.MonkeyPatch):
    check_segments(FAMILY, monkeypatch, "cpu", torch.float32)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_segments_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    check_segments(FAMILY, monkeypatch, "cuda", dtype)


# (sequences, tokens, heads, head dim, dtype)
SHAPES = {
    "RecurrentGemma-2B decode 64": (64, 64, 10, 256, torch.bfloat16),
    "RecurrentGemma-2B 8192": (4, 8192, 10, 256, torch.bfloat16),
    "RecurrentGemma-9B 8192 float32": (4, 8192, 16, 256, torch.float32),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    assert_shapes_fit(Path(__file__).parent, SHAPES, record_launches, carried)


def record_launches(
    target: str, num_seqs: int, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Launch]:
    """What the launcher launches for x that is a slice of a projection."""
    from torch_hybrid.ops.rg_lru import _triton

    channels = num_heads * head_dim
    projected = torch.empty(num_tokens, 2 * channels, dtype=dtype, device="meta")
    gates = projected.new_empty(num_heads, num_tokens, 2 * head_dim)
    log_a = torch.empty(channels, device="meta")
    indices = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    with launches_on(target) as launches:
        _triton.rg_lru(
            Inputs(
                x=projected[:, :channels],
                gates=gates.transpose(0, 1),
                log_a=log_a,
                state=log_a.new_empty(num_seqs + 1, channels),
                cu_seqlens=indices,
                initial_indices=indices[1:],
                state_indices=indices[1:],
            )
        )
    return launches
