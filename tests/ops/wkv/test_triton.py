"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.triton_compile import SHARED_LIMITS, Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from tests.ops.wkv.cases import CASES, Case, Inputs
from tests.ops.wkv.test_contract import expect
from torch_hybrid.ops.wkv import wkv

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/wkv -k triton
CONTRACT = """
    (triton and not triton_invariant and (exact and not rwkv_4 or no_exponential
    or segments or first_token or not_stored or nothing_to_do)
    or triton_invariant and segments_are_the_whole)
    and not on_a_gpu and not in_the_interpreter
"""
# Of several segments of 8 tokens, of one, of none; the second begins within one of the first's.
SEGMENTS = Case(lengths=(41, 33, 8, 0, 1), num_padding_tokens=3)


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__).parent, " ".join(CONTRACT.split()))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    expected = expect(case, dtype)
    moved = on_device(expected.inputs)
    out = wkv(*moved.args(), impl="triton")
    expected.check(out.cpu(), moved.state.cpu())


@needs_interpreter
def test_segments_in_interpreter(monkeypatch: pytest.MonkeyPatch):
    check_segments(monkeypatch, "cpu", torch.float32)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_segments_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    check_segments(monkeypatch, "cuda", dtype)


def check_segments(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype):
    """Sequences in segments are as exact as whole ones, and none knows what is beside it."""
    from torch_hybrid.ops.wkv import _triton

    monkeypatch.setattr(_triton, "_SEGMENT", 8)
    expected = expect(SEGMENTS, dtype)
    moved = on_device(expected.inputs, device)
    out = wkv(*moved.args(), impl="triton")
    expected.check(out.cpu(), moved.state.cpu())
    for n, begin, end in ((0, 0, 41), (1, 41, 74)):
        alone = on_device(expected.inputs, device)
        alone = replace(
            alone,
            **alone.tokens(slice(begin, end)),
            cu_seqlens=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            initial_indices=alone.initial_indices[n : n + 1],
            state_indices=alone.state_indices[n : n + 1],
        )
        assert torch.equal(wkv(*alone.args(), impl="triton"), out[begin:end])
        slot = expected.inputs.state_indices[n]
        assert torch.equal(alone.state[slot], moved.state[slot])


def on_device(inputs: Inputs, device: str = "cuda") -> Inputs:
    moved = {f.name: getattr(inputs, f.name).to(device, copy=True) for f in fields(inputs)}
    return replace(inputs, **moved)


# (sequences, tokens, channels, dtype)
SHAPES = {
    "RWKV-4-1B5 decode 64": (64, 64, 2048, torch.bfloat16),
    "RWKV-4-1B5 8192": (4, 8192, 2048, torch.bfloat16),
    "RWKV-4-14B 8192 float32": (4, 8192, 5120, torch.float32),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = [
        resources_of(launch, target, label + ", carried" * launch.kwargs["CARRIED"])
        for label, shape in SHAPES.items()
        for target in SHARED_LIMITS
        for launch in record_launches(target, *shape).values()
    ]
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


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
            k,
            k,
            log_decay,
            log_decay,
            log_decay.new_empty(num_seqs + 1, 3, num_channels),
            indices,
            indices[1:],
            indices[1:],
        )
    return launches
