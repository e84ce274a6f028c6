"""The chunk form in Triton: in the interpreter, compiled for GPUs not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.recurrent_triton import check, check_captured
from tests.ops.ssd.cases import CASES, Case, Inputs, make_inputs, skip_beyond
from tests.ops.ssd.test_triton import on_meta
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    launches_on,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.ssd import ssd
from torch_hybrid.ops.ssd.reference import ssd_reference

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/ssd -k triton
CONTRACT = """
    chunk32-triton and exact and (one_token or odd_dims or three_heads and fp32)
    or test_triton_chunk.py and in_interpreter
"""
# Of several segments, of one, of none; the second begins within what was one of the first's.
SEGMENTS = Case(lengths=(170, 64, 0, 65, 1), num_heads=2, k_dim=32, v_dim=32, num_padding_tokens=3)
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "chunk_size"),
    [
        (torch.float32, 64),
        (torch.float16, 64),
        (torch.bfloat16, 16),
        (torch.bfloat16, 32),
        (torch.bfloat16, 128),
    ],
    ids=["fp32", "fp16", "bf16-16", "bf16-32", "bf16-128"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype, chunk_size: int):
    skip_beyond(case, dtype)
    check(partial(run, chunk_size=chunk_size), ssd_reference, make_inputs(case, dtype))


@needs_cuda
@pytest.mark.parametrize("decay", [0.0, -1e-3, -5.0, -50.0, -torch.inf])
def test_decays_on_a_gpu(decay: float):
    inputs = make_inputs(Case(lengths=(130, 17)), torch.bfloat16)
    inputs.g.fill_(decay)
    check(run, ssd_reference, inputs)


@needs_cuda
def test_a_captured_graph_serves_other_lengths():
    """Three sequences of a bucket of 200 tokens, replayed with other lengths and slots."""
    first = Case(lengths=(1, 100, 1), k_dim=32, v_dim=32, num_padding_tokens=98)
    others = [
        replace(first, lengths=lengths, num_padding_tokens=200 - sum(lengths))
        for lengths in [(150, 0, 49), (64, 65, 63)]
    ]
    first, *others = (
        make_inputs(case, torch.bfloat16, seed) for seed, case in enumerate([first, *others])
    )
    check_captured(run, ssd_reference, first, others)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_in_interpreter(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    check_segments(monkeypatch, "cpu", dtype)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_segments_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    check_segments(monkeypatch, "cuda", dtype)


def check_segments(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype):
    """Sequences in segments of 64 tokens are as exact as whole ones, also on the same slots."""
    from torch_hybrid.ops.ssd import _triton_chunk

    monkeypatch.setattr(_triton_chunk, "_segment", lambda *_: 64)
    check(run, ssd_reference, make_inputs(SEGMENTS, dtype), device)


def run(inputs: Inputs, chunk_size: int = 64) -> Tensor:
    return ssd(*inputs.args(), **inputs.options(), chunk_size=chunk_size, impl="chunk_triton")


# (chunk size, groups, heads, K, V, args, dtype), 8192 tokens in 16 sequences
SHAPES = {
    "Bamba": (64, 1, 128, 128, 64, "dt D", torch.bfloat16),
    "Bamba float32": (64, 1, 128, 128, 64, "dt D", torch.float32),
    "Falcon-H1": (64, 1, 24, 256, 64, "dt D", torch.bfloat16),
    "MiniMax-01": (64, 64, 64, 96, 96, "", torch.bfloat16),
    "Ring-2.5": (64, 32, 32, 128, 128, "", torch.bfloat16),
    "xLSTM-7b": (64, 8, 8, 256, 528, "dt", torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = []
    for label, shape in SHAPES.items():
        for target in SHARED_LIMITS:
            for name, launch in record_launches(target, *shape).items():
                if label == "Bamba" or name != "_decay_kernel":
                    rows.append(resources_of(launch, target, label))
    table = Path(__file__).with_name("resources_chunk.txt")
    # 1.3x to 1.9x as fast as twice the warps, on an H200.
    assert_all_fit(rows, table, may_spill={"chunk": 24, "segment": 8})
    for row in rows:
        is_product = "float32" not in row.kernel and not row.kernel.startswith("decay")
        assert (row.products != "-") == is_product, row


def record_launches(target: str, chunk_size: int, *shape: Any) -> dict[str, Launch]:
    """Note what the launcher launches."""
    from torch_hybrid.ops.ssd import _triton_chunk

    with launches_on(target) as launches:
        _triton_chunk.chunk_ssd(replace(on_meta(16, 8192, *shape), chunk_size=chunk_size))
    return launches
