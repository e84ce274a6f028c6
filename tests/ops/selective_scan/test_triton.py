"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.recurrent_triton import check, check_captured
from tests.ops.selective_scan.cases import CASES, Case, Inputs, make_inputs
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    launches_on,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.selective_scan import selective_scan
from torch_hybrid.ops.selective_scan.reference import selective_scan_reference

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/selective_scan -k triton
CONTRACT = """
    recurrent-triton and (
        exact and (one_token or decode or odd_sizes or many_states or not_gated or bias)
    ) or in_interpreter
"""
# Of several segments of 8 tokens, of one, of none; the second begins within one of the first's.
SEGMENTS = Case(
    lengths=(21, 8, 0, 9, 1), channels=38, num_groups=2, bias="float32", num_padding_tokens=3
)
IMPLS = ("recurrent_triton", "chunk_triton")
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype, impl: str):
    check(partial(run, impl), selective_scan_reference, make_inputs(case, dtype))


@needs_cuda
@pytest.mark.parametrize("impl", IMPLS)
def test_a_captured_graph_serves_other_lengths(impl: str):
    """Three sequences of a bucket of 1100 tokens, replayed with other lengths and slots."""
    first = Case(lengths=(1, 900, 1), num_padding_tokens=198)
    others = [
        replace(first, lengths=lengths, num_padding_tokens=1100 - sum(lengths))
        for lengths in [(600, 0, 450), (64, 65, 63)]
    ]
    first, *others = (make_inputs(case, seed=seed) for seed, case in enumerate([first, *others]))
    check_captured(partial(run, impl), selective_scan_reference, first, others)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_in_interpreter(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    check_segments(monkeypatch, "cpu", dtype)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_segments_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    check_segments(monkeypatch, "cuda", dtype)


def check_segments(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype):
    """Sequences in segments are as exact as whole ones, also from other slots."""
    from torch_hybrid.ops.selective_scan import _triton

    monkeypatch.setattr(_triton, "_SEGMENT", 16)  # 8 of so few channels
    inputs = make_inputs(SEGMENTS, dtype)
    chunked = partial(run, "chunk_triton")
    check(chunked, selective_scan_reference, inputs, device)
    starts = inputs.initial_indices.clone()
    starts[:] = len(inputs.state) - 1  # which nobody writes
    inputs = replace(inputs, initial_indices=starts)
    check(chunked, selective_scan_reference, inputs, device)


def run(impl: str, inputs: Inputs) -> Tensor:
    return selective_scan(*inputs.args(), **inputs.options(), impl=impl)


# (sequences, tokens, dtype), of 8192 channels with 16 states
SHAPES = {
    "recurrent": {
        "Falcon-Mamba decode 64": (64, 64, torch.bfloat16),
        "Falcon-Mamba decode 64 float32": (64, 64, torch.float32),
    },
    "chunk": {
        "Falcon-Mamba": (16, 8192, torch.bfloat16),
        "Falcon-Mamba float32": (16, 8192, torch.float32),
    },
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = [
        resources_of(launch, target, label)
        for form, shapes in SHAPES.items()
        for label, shape in shapes.items()
        for target in SHARED_LIMITS
        for launch in record_launches(target, form, *shape).values()
    ]
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


def record_launches(
    target: str, form: str, num_seqs: int, num_tokens: int, dtype: torch.dtype
) -> dict[str, Launch]:
    """What the launcher launches for x and z that are slices of one projection, as B and C are."""
    from torch_hybrid.ops.selective_scan import _triton

    channels, state_dim, rank = 8192, 16, 256
    x, z = torch.empty(num_tokens, 2 * channels, dtype=dtype, device="meta").chunk(2, 1)
    selecting = x.new_empty(num_tokens, 1, rank + 2 * state_dim)
    _, B, C = selecting.split([rank, state_dim, state_dim], 2)
    indices = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    with launches_on(target) as launches:
        _triton.selective_scan(
            Inputs(
                x=x,
                dt=x.new_empty(x.shape),
                B=B,
                C=C,
                z=z,
                A_log=x.new_empty(channels, state_dim),
                D=x.new_empty(channels),
                state=torch.empty(num_seqs + 1, channels, state_dim, device="meta"),
                cu_seqlens=indices,
                initial_indices=indices[1:],
                state_indices=indices[1:],
                dt_bias=x.new_empty(channels),
            ),
            is_chunked=form == "chunk",
        )
    return launches
