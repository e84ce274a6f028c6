"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.causal_conv1d.cases import CASES, Case, Inputs, make_inputs
from tests.ops.contract import assert_within_budget, rows_apart
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_shapes_fit
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.causal_conv1d.reference import causal_conv1d_reference

# What of the contract the interpreter can do in seconds. It cuts off what a GPU rounds to bfloat16:
# states of products would differ.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/causal_conv1d -k triton
CONTRACT = """
    triton and (exact and not qwen3_next and not bamba and not lfm or segments)
    and not (gates and bf16) and not on_a_gpu and not interpreter
"""
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    inputs = make_inputs(case, dtype)
    moved = on_device(inputs)
    assert_as_exact(inputs, call(moved).cpu(), moved.conv_state.cpu())


@needs_cuda
def test_a_captured_graph_serves_other_lengths():
    """Three sequences of a bucket of 80 tokens, replayed with other lengths and slots."""
    captured = on_device(make_inputs(Case(lengths=(1, 50, 1), num_padding_tokens=28)))
    call(captured)  # compiles the kernel, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(captured)
    for seed, lengths in enumerate([(2, 0, 70), (32, 33, 1)], 1):
        case = Case(lengths=lengths, num_padding_tokens=80 - sum(lengths))
        other = make_inputs(case, seed=seed)
        for name in tensor_fields(captured):
            getattr(captured, name).copy_(getattr(other, name))
        graph.replay()
        assert_as_exact(other, out.cpu(), captured.conv_state.cpu())


def call(inputs: Inputs) -> Tensor:
    return causal_conv1d(*inputs.args(), **inputs.options(), impl="triton")


def assert_as_exact(inputs: Inputs, out: Tensor, conv_state: Tensor) -> None:
    exact, reference = inputs.exact(), inputs.fresh()
    out_exact = causal_conv1d_reference(exact)
    out_reference = causal_conv1d_reference(reference)
    assert_within_budget(out, out_exact, out_reference)
    num_tokens = int(inputs.cu_seqlens[-1])
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    torch.testing.assert_close(conv_state, reference.conv_state, rtol=0, atol=0, equal_nan=True)


def tensor_fields(inputs: Inputs) -> list[str]:
    return [f.name for f in fields(inputs) if isinstance(getattr(inputs, f.name), Tensor)]


def on_device(inputs: Inputs) -> Inputs:
    """Copies on the GPU; rows of x still lie apart."""
    moved = {name: getattr(inputs, name).to("cuda") for name in tensor_fields(inputs)}
    return replace(inputs, **moved | {"x": rows_apart(moved["x"])})


# (sequences, tokens, channels, width, form, dtype)
SHAPES = {
    "Qwen3-Next decode 64": (64, 64, 8192, 4, "plain", torch.bfloat16),
    "Qwen3-Next extend 8192": (4, 8192, 8192, 4, "plain", torch.bfloat16),
    "Qwen3-Next extend 8192 float32": (4, 8192, 8192, 4, "plain", torch.float32),
    "LFM2 decode 64": (64, 64, 2048, 3, "gates", torch.bfloat16),
    "LFM3 extend 8192": (4, 8192, 2048, 7, "gates", torch.bfloat16),
    "Inkling-2 decode 64": (64, 64, 2048, 4, "taps", torch.bfloat16),
    "Inkling-2 extend 8192": (4, 8192, 2048, 4, "taps", torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    assert_shapes_fit(Path(__file__).parent, SHAPES, record_launches)


def record_launches(
    target: str,
    num_seqs: int,
    num_tokens: int,
    channels: int,
    width: int,
    form: str,
    dtype: torch.dtype,
) -> dict[str, Launch]:
    """What the launcher launches for x that is a slice of a projection."""
    from torch_hybrid.ops.causal_conv1d import _triton

    projected = torch.empty(num_tokens, 3 * channels, dtype=dtype, device="meta")
    x, *gates = projected.split(channels, dim=1)
    options: dict[str, Tensor] = {}
    if form == "gates":
        options = dict(zip(["input_gate", "output_gate"], gates, strict=True))
    elif form == "taps":
        options = {"token_taps": projected.new_empty(num_tokens, channels // 128, width)}
    indices = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    with launches_on(target) as launches:
        _triton.causal_conv1d(
            Inputs(
                x=x,
                weight=projected.new_empty(channels, width),
                bias=None,
                conv_state=projected.new_empty(num_seqs + 1, width - 1, channels),
                cu_seqlens=indices,
                initial_indices=indices[1:],
                state_indices=indices[1:],
                activation="silu" if form == "plain" else "none",
                **options,
            )
        )
    return launches
