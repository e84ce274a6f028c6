"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import assert_within_budget
from tests.ops.latent_attention.cases import CASES, TENSORS, Case, Inputs, make_inputs
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    launches_on,
    needs_cross_compiler,
    simplified_ir,
)
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.latent_attention import latent_attention, reference
from torch_hybrid.ops.latent_attention.op import LatentAttention

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/latent_attention -k triton
CONTRACT = """
    triton and not triton_invariant and (
        matches_float64 and (one_head or odd or long_decode and fp16)
        or 8_bits or overflow
    )
    or triton_invariant and (matches_float64 and odd and bf16 or chunked and written-1)
    or by_documentation
"""

# Blocks of 64 rows, which on Hopper take a form that is not interpreted: whole splits without keys,
# pages of any size, tokens that end within a block.
HOPPER = {
    "splits": Case(num_heads=128, page_size=5, lengths=((1, 700), (1, 1), (1, 130))),
    "tokens": Case(num_heads=20, page_size=64, lengths=((7, 300), (0, 9), (2, 2), (9, 65))),
    "not split": Case(num_heads=64, lengths=((1, 200), (1, 63), *[(1, 3)] * 130)),
}
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES | HOPPER)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = (CASES | HOPPER)[name]
    inputs = make_inputs(case, dtype=dtype, padding=(3, 2))
    moved = on_device(inputs)
    out = call(moved, case.scale)
    assert_as_exact(inputs, case.scale, out.cpu(), moved.pool.cpu())


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_graph_serves_other_lengths(dtype: torch.dtype) -> None:
    """Two sequences in a bucket of eight tokens, replayed with other lengths and pages."""
    shape = Case(num_heads=16, lengths=((1, 70), (1, 9)))
    captured = on_device(make_inputs(shape, dtype=dtype, padding=(6, 0)))
    call(captured, shape.scale)  # compiles the kernels, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(captured, shape.scale)
    other = make_inputs(
        replace(shape, lengths=((3, 9), (4, 70))), dtype=dtype, padding=(1, 0), seed=1
    )
    for name in TENSORS:
        getattr(captured, name).copy_(getattr(other, name))
    graph.replay()
    assert_as_exact(other, shape.scale, out.cpu(), captured.pool.cpu())


def call(inputs: Inputs, scale: float) -> Tensor:
    tensors = [getattr(inputs, name) for name in TENSORS]
    return latent_attention(*tensors, scale=scale, pool_scale=inputs.pool_scale, impl="triton")


def assert_as_exact(inputs: Inputs, scale: float, out: Tensor, pool: Tensor) -> None:
    own = replace(inputs.fresh(), scale=scale)
    exact = reference.latent_attention(own.to(torch.float64).fresh())
    rounded = reference.latent_attention(own)
    num_tokens = int(inputs.cu_seqlens[-1])
    assert_within_budget(out, exact, rounded)
    assert not out[num_tokens:].any()
    assert torch.equal(pool.view(torch.uint8), own.pool.view(torch.uint8))


def on_device(inputs: Inputs) -> Inputs:
    """Copies on the GPU; queries out of a product with heads first, latents slices of one."""
    given = {name: getattr(inputs, name) for name in (*TENSORS, "pool_scale")}
    moved = {name: x.to("cuda", copy=True) for name, x in given.items() if x is not None}
    heads_first = moved["q_latent"].transpose(0, 1).contiguous().transpose(0, 1)
    rows = torch.cat([moved["latent"], moved["k_rope"]], 1)
    latent, k_rope = rows.split([moved["latent"].shape[1], moved["k_rope"].shape[1]], 1)
    return replace(inputs, **moved | {"q_latent": heads_first, "latent": latent, "k_rope": k_rope})


# (sequences, tokens, heads, dtype, whether latents have 8 bits); pages of 16, 256 a sequence
SHAPES = {
    "DeepSeek-V3 decode 64": (64, 64, 128, torch.bfloat16, False),
    "Kimi-Linear decode 64": (64, 64, 32, torch.bfloat16, False),
    "Kimi-Linear decode 64 float32": (64, 64, 32, torch.float32, False),
    "DeepSeek-V2-Lite decode 64": (64, 64, 16, torch.bfloat16, False),
    "Kimi-Linear 64 tokens each": (8, 512, 32, torch.bfloat16, False),
    "Kimi-Linear decode 512, not split": (512, 512, 32, torch.bfloat16, False),
    "DeepSeek-V3 decode 64, fp8": (64, 64, 128, torch.bfloat16, True),
    "DeepSeek-V2-Lite decode 64, fp8": (64, 64, 16, torch.bfloat16, True),
}
# Where a token's tile is that of many.
ANY_LENGTHS = {
    "DeepSeek-V3": (64, 64, 128, torch.bfloat16, False),
    "DeepSeek-V2-Lite": (64, 64, 16, torch.bfloat16, False),
    "DeepSeek-V2-Lite, fp8": (64, 64, 16, torch.bfloat16, True),
}


@needs_cross_compiler
def test_logits_are_sums_of_short_sums() -> None:
    """The compiler makes one chain of products that are added to one another, if it may."""
    launch = record_launches("sm_90", 64, 64, 16, torch.float32, False)["_attend_kernel"]
    begun = re.findall(r"tt\.dot %\S+, %\S+, %cst", simplified_ir(launch, "sm_90"))
    rank, part = (launch.kwargs[name] for name in ("BLOCK_RANK", "BLOCK_PART"))
    assert len(begun) == 1 + rank // part  # k_rope, and each part of the latents


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = []
    once = {"_store_kernel", "_merge_kernel", "_padding_kernel"}
    for number, (label, shape) in enumerate(SHAPES.items()):
        for target in SHARED_LIMITS:
            for name, launch in record_launches(target, *shape).items():
                if number == 0 or name not in once:
                    rows.append(resources_of(launch, target, label))
    for label, shape in ANY_LENGTHS.items():
        for target in SHARED_LIMITS:
            launches = record_launches(target, *shape, is_invariant=True)
            name = next(name for name in launches if "attend" in name)
            rows.append(resources_of(launches[name], target, f"{label} any lengths"))
    launches = record_launches("sm_90", *SHAPES["DeepSeek-V3 decode 64"], gluon=False)
    rows.append(resources_of(launches["_attend_kernel"], "sm_90", "DeepSeek-V3 of other Gluon"))
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))
    for row in rows:
        # Lost when the compiler can no longer prove that rows of latents are aligned.
        assert row.async_copies > 0 or "attend" not in row.kernel, row


def record_launches(
    target: str,
    num_seqs: int,
    num_tokens: int,
    num_heads: int,
    dtype: torch.dtype,
    fp8: bool,
    *,
    gluon: bool = True,
    is_invariant: bool = False,
) -> dict[str, Launch]:
    """What the launcher launches for rows of 512 and 64."""
    from torch_hybrid.ops.latent_attention import _triton

    def rows(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def index(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    with launches_on(target, gluon=gluon) as launches:
        call = LatentAttention(
            rows(num_tokens, num_heads, 512),
            rows(num_tokens, num_heads, 64),
            rows(num_tokens, 512),
            rows(num_tokens, 64),
            rows(1024, 16, 576).to(torch.float8_e4m3fn if fp8 else dtype),
            index(num_seqs + 1),
            index(num_seqs),
            index(num_seqs, 256),
            index(num_tokens),
            scale=1.0,
            pool_scale=torch.empty(1, device="meta") if fp8 else None,
            impl="triton",
        )
        _triton.latent_attention(call, is_invariant=is_invariant)
    return launches
