"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import assert_within_budget
from tests.ops.paged_attention.cases import (
    CASES,
    OPTIONS,
    TENSORS,
    Case,
    Inputs,
    hide_what_is_before,
    make_biases,
    make_inputs,
)
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    launches_on,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import interprets, needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.paged_attention import paged_attention_with_lse, reference
from torch_hybrid.ops.paged_attention.op import PagedAttentionWithLse

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/paged_attention -k triton
CONTRACT = """
    triton and not triton_invariant and (
        matches_float64 and (
            odd and (fp32 or plain) or one_head and fp32 or long_decode and fp16 and plain
        )
        or biases and (float64 and odd and 30 and fp32 or distance) or biased_sequences
        or merges or out_of_range or 8_bits and not long
    )
    or triton_invariant and window_softcap and (matches and odd and bf16 or chunked and 7])
    or in_interpreter or by_documentation
"""

# Shapes at which the kernels take another path than at those of the contract.
PATHS = {
    "more_sequences_than_one_search": Case(
        num_q_heads=1, num_kv_heads=1, head_dim=8, lengths=((0, 0),) * 258 + ((1, 3), (2, 2))
    ),
    "twenty_queries_per_key_head": Case(
        num_q_heads=20, num_kv_heads=1, head_dim=16, page_size=4, lengths=((3, 9), (1, 30))
    ),
    "more_splits_than_one_merge": Case(
        num_q_heads=2, num_kv_heads=1, head_dim=72, page_size=64, lengths=((1, 4000),)
    ),
}


# Queries long enough for the kernel that reads the new rows where they are, once it may run for as
# few programs as these.
LONG = {
    "prefix_and_rows": Case(
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=80,
        page_size=5,
        lengths=((90, 170), (150, 150), (1, 40)),
    ),
    "pages_of_a_tile": Case(
        num_q_heads=4, num_kv_heads=1, head_dim=64, page_size=64, lengths=((65, 150), (131, 131))
    ),
}

# Of the sizes of the form for Hopper, which is not interpreted: pages of any size, groups of three.
HOPPER = {
    "64": Case(
        num_q_heads=6, num_kv_heads=2, head_dim=64, page_size=5, lengths=((90, 290), (150, 150))
    ),
    "128": Case(
        num_q_heads=8, num_kv_heads=2, head_dim=128, lengths=((33, 289), (300, 300), (1, 40))
    ),
    "256": Case(
        num_q_heads=16, num_kv_heads=2, head_dim=256, page_size=64, lengths=((70, 198), (0, 3))
    ),
}
test_in_the_interpreter = interprets(CONTRACT)


@needs_interpreter
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", PATHS)
def test_paths_in_interpreter(name: str, fp8: bool) -> None:
    check("cpu", PATHS[name], torch.float16, "plain", fp8=fp8)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "options", "fp8"),
    [
        *(("prefix_and_rows", options, False) for options in ("window", "softcap")),
        *itertools.product(LONG, ("plain", "window_softcap"), (False, True)),
    ],
)
def test_long_queries_in_interpreter(
    name: str, options: str, fp8: bool, long_queries: None
) -> None:
    check("cpu", LONG[name], torch.float16, options, fp8=fp8)


@needs_interpreter
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("options", "reach"), [("window_softcap", 100), ("softcap", 30)])
def test_long_biased_queries_in_interpreter(
    options: str, reach: int, fp8: bool, long_queries: None
) -> None:
    check("cpu", LONG["prefix_and_rows"], torch.float16, options, fp8=fp8, reach=reach)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LONG | HOPPER)
@pytest.mark.parametrize("fp8", [False, True])
def test_long_biased_queries_on_a_gpu(
    name: str, dtype: torch.dtype, fp8: bool, long_queries: None
) -> None:
    for options, reach in itertools.product(OPTIONS, (30, 100)):
        check("cuda", (LONG | HOPPER)[name], dtype, options, fp8=fp8, reach=reach)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
def test_biases_on_a_gpu(name: str, dtype: torch.dtype, fp8: bool) -> None:
    for options in OPTIONS:
        check("cuda", CASES[name], dtype, options, fp8=fp8, reach=70)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LONG | HOPPER)
@pytest.mark.parametrize("fp8", [False, True])
def test_long_queries_on_a_gpu(
    name: str, dtype: torch.dtype, fp8: bool, long_queries: None
) -> None:
    for options in OPTIONS:
        check("cuda", (LONG | HOPPER)[name], dtype, options, fp8=fp8)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES | PATHS)
@pytest.mark.parametrize("fp8", [False, True])
def test_on_a_gpu(name: str, dtype: torch.dtype, fp8: bool) -> None:
    for options in OPTIONS:
        check("cuda", (CASES | PATHS)[name], dtype, options, fp8=fp8)


@needs_cuda
def test_a_captured_graph_serves_other_lengths() -> None:
    """Two sequences in a bucket of eight tokens, replayed with other lengths and pages."""
    shape = Case(num_q_heads=4, num_kv_heads=2, head_dim=64, lengths=((1, 70), (1, 9)))
    captured = on_device(make_inputs(shape, padding=(6, 0)), "cuda")
    call(captured, "plain")  # compiles the kernels, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(captured, "plain")
    other = make_inputs(replace(shape, lengths=((3, 9), (4, 70))), padding=(1, 0), seed=1)
    for name in TENSORS:
        getattr(captured, name).copy_(getattr(other, name))
    graph.replay()
    assert_as_exact(other, "plain", out.cpu(), lse.cpu(), captured.kv.cpu())


@pytest.fixture
def long_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of one processor, which few programs fill; that kernel alone may attend."""
    from torch_hybrid.ops.paged_attention import _triton, _triton_long

    monkeypatch.setattr(_triton_long, "PROCESSORS", 1)
    monkeypatch.setattr(_triton_long, "LEAST_WINDOW", 0)
    monkeypatch.setattr(_triton_long, "is_hopper", lambda _: True)
    monkeypatch.delattr(_triton, "attend_short")


def check(
    device: str,
    case: Case,
    dtype: torch.dtype,
    options: str,
    *,
    fp8: bool = False,
    reach: int = 0,
) -> None:
    """The kernels on ``device`` are as exact as the reference and write their rows alone."""
    inputs = make_inputs(case, dtype=dtype, padding=(3, 2), fp8=fp8)
    biases = make_biases(inputs, reach=reach) if reach else None
    hide_what_is_before(OPTIONS[options]["window"], inputs)
    moved = on_device(inputs, device)
    out, lse = call(moved, options, None if biases is None else biases.to(device))
    assert_as_exact(inputs, options, out.cpu(), lse.cpu(), moved.kv.cpu(), biases)


def call(inputs: Inputs, options: str, biases: Tensor | None = None) -> tuple[Tensor, Tensor]:
    tensors = [getattr(inputs, name) for name in TENSORS]
    chosen = {"scale": inputs.scale, "kv_scales": inputs.kv_scales, **OPTIONS[options]}
    return paged_attention_with_lse(*tensors, impl="triton", relative_bias=biases, **chosen)


def assert_as_exact(
    inputs: Inputs,
    options: str,
    out: Tensor,
    lse: Tensor,
    kv: Tensor,
    biases: Tensor | None = None,
) -> None:
    given = replace(inputs.fresh(), relative_bias=biases, **OPTIONS[options])
    exact = reference.paged_attention_with_lse(given.to(torch.float64).fresh())
    rounded = reference.paged_attention_with_lse(given)
    num_tokens = int(inputs.cu_seqlens[-1])
    assert_within_budget(out, exact[0], rounded[0])
    assert_within_budget(lse[:num_tokens], exact[1][:num_tokens], rounded[1][:num_tokens])
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    assert (lse[num_tokens:] == -torch.inf).all()
    assert torch.equal(kv.view(torch.uint8), given.kv.view(torch.uint8))


def on_device(inputs: Inputs, device: str) -> Inputs:
    """Copies on ``device``; q lies beside a gate within each head, k and v within one tensor."""
    given = {name: getattr(inputs, name) for name in (*TENSORS, "kv_scales")}
    moved = {name: x.to(device, copy=True) for name, x in given.items() if x is not None}
    gated = torch.cat([moved["q"], torch.full_like(moved["q"], torch.nan)], 2)
    k, v = torch.cat([moved["k"], moved["v"]], 1).chunk(2, 1)
    return replace(inputs, **moved | {"q": gated[..., : gated.shape[2] // 2], "k": k, "v": v})


# A window that the form for Hopper takes.
WIDE = {"wide_window": {"window": 512, "softcap": 0.0}}
# (sequences, tokens, query heads, key heads, head dim, dtype, options, whether keys have 8 bits);
# pages of 16, 256 a sequence
SHAPES = {
    "Qwen3-Next decode 64": (64, 64, 16, 2, 256, torch.bfloat16, "plain", False),
    "Qwen3-Next decode 64 float32": (64, 64, 16, 2, 256, torch.float32, "plain", False),
    "Qwen3-Next 4 tokens each": (64, 256, 16, 2, 256, torch.bfloat16, "plain", False),
    "Qwen3-Next extend 2048": (8, 2048, 16, 2, 256, torch.bfloat16, "plain", False),
    "32 / 8 heads of 128 extend 2048": (8, 2048, 32, 8, 128, torch.bfloat16, "plain", False),
    "40 / 40 heads of 128 extend 2048": (
        8,
        2048,
        40,
        40,
        128,
        torch.bfloat16,
        "window_softcap",
        False,
    ),
    "3 / 1 heads of 80 decode 1": (1, 1, 3, 1, 80, torch.bfloat16, "window_softcap", False),
    "32 / 8 heads extend 2048, window": (8, 2048, 32, 8, 128, torch.bfloat16, "wide_window", False),
    "Qwen3-Next decode 64, fp8": (64, 64, 16, 2, 256, torch.bfloat16, "plain", True),
    "32 / 8 heads extend 2048, fp8": (8, 2048, 32, 8, 128, torch.bfloat16, "plain", True),
    "32 / 8 heads decode 32, fp8": (32, 32, 32, 8, 128, torch.bfloat16, "plain", True),
}
# The same with biases of 1024 distances.
BIASED = {
    "Inkling decode 32": (32, 32, 64, 8, 128, torch.bfloat16, "plain", False),
    "Inkling decode 32 float32": (32, 32, 64, 8, 128, torch.float32, "window", False),
    "Inkling extend 2048": (8, 2048, 64, 16, 128, torch.bfloat16, "wide_window", False),
    "Inkling extend 2048, fp8": (8, 2048, 64, 8, 128, torch.bfloat16, "plain", True),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = []
    once = {"_write_kernel", "_merge_kernel"}
    for number, (label, shape) in enumerate(SHAPES.items()):
        for target in SHARED_LIMITS:
            for kernel, launch in record_launches(target, *shape).items():
                if number == 0 or kernel not in once or (shape[-1] and kernel == "_write_kernel"):
                    rows.append(resources_of(launch, target, label))
    for label, shape in BIASED.items():
        for target in SHARED_LIMITS:
            for kernel, launch in record_launches(target, *shape, reach=1024).items():
                if kernel not in once | {"_write_kernel"}:
                    rows.append(resources_of(launch, target, label))
    launches = record_launches("sm_90", *SHAPES["Qwen3-Next extend 2048"], gluon=False)
    rows.append(resources_of(launches["_long_kernel"], "sm_90", "Qwen3-Next of other Gluon"))
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))
    for row in rows:
        if not row.kernel.startswith(("write", "merge")):
            # Lost when the compiler can no longer prove that rows of keys are aligned.
            assert row.async_copies > 0, row


def record_launches(
    target: str,
    num_seqs: int,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    options: str,
    fp8: bool,
    *,
    gluon: bool = True,
    reach: int = 0,
) -> dict[str, Launch]:
    """What the launcher launches for q, k and v that are slices of one projection."""
    from torch_hybrid.ops.paged_attention import _triton

    heads = [num_q_heads, num_kv_heads, num_kv_heads]
    qkv = torch.empty(num_tokens, sum(heads), head_dim, dtype=dtype, device="meta")
    kept = torch.float8_e4m3fn if fp8 else dtype
    kv = torch.empty(2, 1024, 16, num_kv_heads, head_dim, dtype=kept, device="meta")
    scales = torch.empty(2, num_kv_heads, device="meta") if fp8 else None
    indices = torch.empty(max(num_tokens, num_seqs + 1), dtype=torch.int32, device="meta")
    table = torch.empty(num_seqs, 256, dtype=torch.int32, device="meta")
    biases = torch.empty(num_tokens, num_q_heads, reach, dtype=dtype, device="meta")
    q, k, v = qkv.split(heads, 1)
    x = PagedAttentionWithLse(
        q=q,
        k=k,
        v=v,
        kv=kv,
        cu_seqlens=indices[: num_seqs + 1],
        seq_lens=indices[:num_seqs],
        page_table=table,
        slot_mapping=indices[:num_tokens],
        scale=head_dim**-0.5,
        kv_scales=scales,
        relative_bias=biases if reach else None,
        impl="triton",
        **(OPTIONS | WIDE)[options],
    )
    with launches_on(target, gluon=gluon) as launches:
        _triton.paged_attention_with_lse(x)
    return launches
