"""The chunk form in Triton: in the interpreter, compiled for GPUs not there, and on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.delta_rule.cases import Case, Inputs, chunked
from tests.ops.delta_rule.kernels import (
    Shape,
    assert_as_exact,
    check_many_chunks,
    check_walks,
    on_device,
    on_meta,
    scanned_in_one_form,
    tensor_fields,
)
from tests.ops.delta_rule.kimi import CASES, make_inputs
from tests.ops.delta_rule.kimi import case as make_case
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    launches_on,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.delta_rule import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/delta_rule -k triton
CONTRACT = """
    kimi and chunk32-triton and (
        exact and (one_token or odd_dims) or exact and one_head and fp32
    )
"""


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__).parent, " ".join(CONTRACT.split()))


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gentle_decays_beside_strong_ones_in_interpreter(dtype: torch.dtype):
    """Pairs of rows meet in one way where all decays of a slice are gentle, else in another."""
    inputs = make_inputs(make_case(34, num_heads=1, k_dim=32), dtype)
    gentle = inputs.g[:, :, :16].clamp(min=-0.5)
    inputs = replace(inputs, g=torch.cat([gentle, inputs.g[:, :, 16:] * 20], -1))
    moved = on_device(inputs, "cpu")
    out = call(moved, 32)
    assert_as_exact(delta_rule_reference, inputs, out, moved.state)


@needs_interpreter
@pytest.mark.parametrize("lengths", [(40, 0, 5), (9, 9, 9)], ids=["uneven", "even"])
def test_segments_in_interpreter(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """Three segments end inside sequences; of two launches one walks, by lengths on the device."""
    from torch_hybrid.ops.delta_rule import _triton_scan as delta_scan
    from torch_hybrid.ops.delta_rule import _triton_scan_kernel
    from torch_hybrid.ops.delta_rule._triton_scan import EVEN, UNEVEN, ScanConfig

    forms = (
        ScanConfig(block_v=16, num_warps=4, steps=UNEVEN.value),
        ScanConfig(block_v=32, num_warps=8, steps=EVEN.value),
    )
    monkeypatch.setattr(delta_scan, "_ALONE", 2)
    monkeypatch.setattr(_triton_scan_kernel, "scan_configs", lambda *args, **options: forms)
    shape = {"num_k_heads": 1, "num_v_heads": 1, "k_dim": 16, "v_dim": 32}
    inputs = make_inputs(Case(lengths=lengths, num_padding_tokens=2, **shape), torch.bfloat16)
    moved = on_device(inputs, "cpu")
    out = call(moved, 32, num_segments=3)
    assert_as_exact(delta_rule_reference, inputs, out, moved.state)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "chunk_size"),
    [
        (torch.float32, 16),
        (torch.float16, 16),
        (torch.bfloat16, 16),
        (torch.bfloat16, 128),
    ],
    ids=["fp32", "fp16", "bf16-16", "bf16-128"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu(case: Case, dtype: torch.dtype, chunk_size: int):
    inputs = make_inputs(case, dtype)
    moved = on_device(inputs, "cuda")
    out = call(moved, chunk_size)
    assert_as_exact(delta_rule_reference, inputs, out.cpu(), moved.state.cpu())


@needs_cuda
@pytest.mark.parametrize("decay", [0.0, -1e-3, -5.0, -50.0, -torch.inf])
def test_decays_on_a_gpu(decay: float):
    inputs = make_inputs(Case(lengths=(130, 17), num_k_heads=4), torch.bfloat16)
    inputs.g.fill_(decay)
    moved = on_device(inputs, "cuda")
    out = call(moved, 64)
    assert_as_exact(delta_rule_reference, inputs, out.cpu(), moved.state.cpu())


@needs_cuda
def test_a_captured_graph_serves_other_lengths():
    """Three sequences of a bucket of 200 tokens, replayed with other lengths and slots."""
    shape = {"num_k_heads": 4, "k_dim": 32, "v_dim": 32}
    first = Case(lengths=(1, 100, 1), num_padding_tokens=98, **shape)
    captured = on_device(make_inputs(first, torch.bfloat16), "cuda")
    call(captured, 64)  # compiles the kernels, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(captured, 64)
    for seed, lengths in enumerate([(150, 0, 49), (64, 65, 63)], 1):
        case = Case(lengths=lengths, num_padding_tokens=200 - sum(lengths), **shape)
        other = make_inputs(case, torch.bfloat16, seed)
        for field in tensor_fields(captured):
            getattr(captured, field).copy_(getattr(other, field))
        graph.replay()
        assert_as_exact(delta_rule_reference, other, out.cpu(), captured.state.cpu())


@needs_cuda
@pytest.mark.parametrize("lengths", [(4096,), (4000, 4096), (900,) * 9, (8000, *[0] * 8)], ids=str)
def test_many_chunks_on_a_gpu(lengths: tuple[int, ...]):
    """In segments; rows of V of a program for sequences that are alike, and for one alone."""
    shape = {"num_k_heads": 32, "num_v_heads": 32, "k_dim": 128, "v_dim": 128}
    inputs = make_inputs(Case(lengths=lengths, **shape), torch.bfloat16)
    check_many_chunks(chunk_kimi_delta_attention, recurrent_kimi_delta_attention, inputs)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_how_it_is_walked_shows_in_no_bit(dtype: torch.dtype):
    shape = {"num_k_heads": 32, "num_v_heads": 32, "k_dim": 128, "v_dim": 128}
    check_walks(
        chunk_kimi_delta_attention, make_inputs(Case(lengths=(4096, 37, 900), **shape), dtype)
    )


def call(inputs: Inputs, chunk_size: int, num_segments: int = 0) -> Tensor:
    planned = [torch.tensor([num_segments, 0])] if num_segments else []
    return chunk_kimi_delta_attention(
        *inputs.args(), **inputs.options(), chunk_size=chunk_size, planned=planned, impl="triton"
    )


# (heads, K, V, dtype), 8192 tokens in 16 sequences
SHAPES = {
    "Kimi-Linear": (32, 128, 128, torch.bfloat16),
    "Kimi-Linear float32": (32, 128, 128, torch.float32),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = [
        resources_of(launch, target, label)
        for label, shape in SHAPES.items()
        for target in SHARED_LIMITS
        for launch in record_launches(target, *shape).values()
    ]
    for label, shape in SHAPES.items():
        scans = record_launches("sm_90", *shape, form=1)
        scans.pop("_prepare_kernel")
        rows += [resources_of(scan, "sm_90", f"{label}, even") for scan in scans.values()]
        if shape[-1] == torch.bfloat16:
            rounded = record_launches("sm_90", *shape, is_exact=False).values()
            rows += [resources_of(each, "sm_90", f"{label}, rounded") for each in rounded]
    table = Path(__file__).with_name("resources_kimi_chunk.txt")
    # Outside its loops, for chunks of strong decays; with fewer registers it was slower.
    may_spill = {"prepare": 24, "prepare: Kimi-Linear, rounded": 64}
    assert_all_fit(rows, table, may_spill=may_spill)
    for row in rows:
        assert (row.products == "-") == ("float32" in row.kernel), row


def record_launches(
    target: str,
    num_heads: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    *,
    form: int = 0,
    is_exact: bool = True,
) -> dict[str, Launch]:
    """What the launcher launches for q, k and v that are slices of one projection."""
    from torch_hybrid.ops.delta_rule import _triton_kimi, _triton_scan_kernel

    shape = Shape(
        num_seqs=16,
        num_tokens=8192,
        num_k_heads=num_heads,
        num_v_heads=num_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        dtype=dtype,
        channels=True,
    )
    with launches_on(target) as launches, scanned_in_one_form(_triton_scan_kernel, form):
        _triton_kimi.chunk_kimi_delta_attention(chunked(on_meta(shape)), is_exact=is_exact)
    return launches
