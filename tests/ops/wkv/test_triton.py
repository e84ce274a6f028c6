"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_shapes_fit
from tests.ops.vector_state_contract import carried, check_on_a_gpu, check_segments
from tests.ops.wkv.cases import CASES, Case, Inputs
from tests.ops.wkv.test_contract import FAMILY

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/wkv -k triton
CONTRACT = """
    (triton and not triton_invariant and (exact and not rwkv_4 or no_exponential
    or segments or first_token or not_stored or nothing_to_do)
    or triton_invariant and segments_are_the_whole)
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


# (sequences, tokens, channels, dtype)
SHAPES = {
    "RWKV-4-1B5 decode 64": (64, 64, 2048, torch.bfloat16),
    "RWKV-4-1B5 8192": (4, 8192, 2048, torch.bfloat16),
    "RWKV-4-14B 8192 float32": (4, 8192, 5120, torch.float32),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    assert_shapes_fit(Path(__file__).parent, SHAPES, record_launches, carried)


def record_launches(
    target: str, num_seqs: int, num_tokens: int, num_channels: int, dtype: torch.dtype
) -> dict[str, Launch]:
    """What the launcher launches for keys and values of projections of their own."""
    from torch_hybrid.ops.wkv import _triton

    k = torch.empty(num_tokens, num_channels, dtype=dtype, device="meta")
    log_decay = torch.empty(num_channels, device="meta")
    indices = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    with launches_on(target) as launches:
        _triton.wkv(
            Inputs(
                k=k,
                v=k,
                log_decay=log_decay,
                bonus=log_decay,
                state=log_decay.new_empty(num_seqs + 1, 3, num_channels),
                cu_seqlens=indices,
                initial_indices=indices[1:],
                state_indices=indices[1:],
            )
        )
    return launches
