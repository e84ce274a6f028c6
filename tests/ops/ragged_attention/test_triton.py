"""The Triton kernel: in the interpreter, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import assert_within_budget
from tests.ops.ragged_attention.cases import CASES, Case, Inputs, make_inputs
from tests.ops.triton_compile import (
    Launch,
    launches_on,
    machine_code,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_at, resources_of
from torch_hybrid.ops.core.declaration import Declaration
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse, reference
from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse
from torch_hybrid.ops.triton.devices import gluon_missing

# What of the contract the interpreter can do in seconds.
# The whole of it: TRITON_INTERPRET=1 pytest tests/ops/ragged_attention -k triton
CONTRACT = """
    triton and (
        matches_float64 and (one_head or no_keys or grouped and fp32 or ling and bf16)
        or padding and no_keys or first_queries or no_sequence or out_of_range or overflow
        or shared_key
    ) or by_documentation
"""

# Of the sizes of the form for Hopper, which is not interpreted: sequences of blocks, with more
# queries than keys, with fewer, and with none.
HOPPER = {
    f"{head_dim}/{v_head_dim}": Case(
        num_heads=6,
        num_k_heads=2 if head_dim == v_head_dim else 6,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        lengths=((300, 300), (140, 413), (131, 65), (129, 0), (1, 200)),
    )
    for head_dim, v_head_dim in ((64, 64), (128, 128), (192, 128), (256, 256))
}
# Some of their key heads after the others.
HOPPER |= {
    f"{num_heads} heads": replace(HOPPER["192/128"], num_heads=num_heads, num_k_heads=num_heads)
    for num_heads in (9, 12, 16)
}

NAMES = list(Declaration(RaggedAttentionWithLse).kinds)  # of the tensors
test_in_the_interpreter = interprets(CONTRACT)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES | HOPPER)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs((CASES | HOPPER)[name], dtype=dtype, padding=(3, 2, 2))
    for causal in (False, True):
        out, lse = call(on_device(inputs), causal)
        assert_as_exact(inputs, causal, out.cpu(), lse.cpu())


@needs_cuda
def test_a_captured_graph_serves_other_lengths() -> None:
    """Two sequences of 200 queries and 300 keys at most, replayed with other lengths."""
    shape = CASES["deepseek_v2_lite"]
    captured = on_device(of_lengths((*shape.lengths[:1], (1, 1)), 0))
    call(captured, True)  # compiles the kernel, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(captured, True)
    for seed, lengths in enumerate([((150, 250), (3, 40)), ((0, 9), (64, 64))], 1):
        other = of_lengths(lengths, seed)
        for held, new in zip(captured.args(), other.args(), strict=True):
            held.copy_(new)
        graph.replay()
        assert_as_exact(other, True, out.cpu(), lse.cpu())


def of_lengths(lengths: tuple[tuple[int, int], ...], seed: int) -> Inputs:
    """Inputs padded to 200 queries and 300 keys."""
    num_q, num_k = (sum(length[i] for length in lengths) for i in (0, 1))
    case = replace(CASES["deepseek_v2_lite"], lengths=lengths)
    padding = (200 - num_q, 300 - num_k, 0)
    return make_inputs(case, dtype=torch.bfloat16, seed=seed, padding=padding)


def call(inputs: Inputs, causal: bool) -> tuple[Tensor, Tensor]:
    return ragged_attention_with_lse(
        *inputs.args(), causal=causal, scale=inputs.scale, impl="triton"
    )


def assert_as_exact(inputs: Inputs, causal: bool, out: Tensor, lse: Tensor) -> None:
    inputs = replace(inputs, causal=causal)
    exact = reference.ragged_attention_with_lse(inputs.exact())
    rounded = reference.ragged_attention_with_lse(inputs)
    empty = exact[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out[empty].any()
    assert_within_budget(out[~empty], exact[0][~empty], rounded[0][~empty])
    assert_within_budget(lse[~empty], exact[1][~empty], rounded[1][~empty])


def on_device(inputs: Inputs) -> Inputs:
    """Copies on the GPU; k and v lie beside each other within each head."""
    moved = {name: getattr(inputs, name).to("cuda", copy=True) for name in NAMES}
    kv = torch.cat([moved["k"], moved["v"]], 2)
    k, v = kv.split([moved["k"].shape[2], moved["v"].shape[2]], 2)
    return replace(inputs, **moved | {"k": k, "v": v})


# (sequences, queries, heads, key heads, head dim, dim of values, dtype)
SHAPES = {
    "DeepSeek-V3 extend 8192": (4, 8192, 128, 128, 192, 128, torch.bfloat16),
    "DeepSeek-V3 extend 8192 float32": (4, 8192, 128, 128, 192, 128, torch.float32),
    "one query each": (64, 64, 32, 32, 192, 128, torch.bfloat16),
    "16 / 2 heads of 256": (4, 8192, 16, 2, 256, 256, torch.bfloat16),
}


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    rows = resources_at(SHAPES, record_launches)
    (launch,) = record_launches("sm_90", *SHAPES["DeepSeek-V3 extend 8192"], gluon=False).values()
    rows.append(resources_of(launch, "sm_90", "DeepSeek-V3 of other Gluon"))
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))
    for row in rows:
        # Lost when the compiler can no longer prove that rows are aligned.
        assert row.async_copies > 0 or row.kernel.startswith("padding"), row


@needs_cross_compiler
@pytest.mark.skipif(gluon_missing() is not None, reason=gluon_missing() or "")
def test_the_softmax_runs_beside_products() -> None:
    """A tile's exponentials lie between the wait for its logits and that for the values before.

    The compiler moves them behind both where nothing keeps it.
    """
    shape = (1, 256, 1, 1, 64, 64, torch.bfloat16)
    code = machine_code(record_launches("sm_90", *shape)["hopper_attend_kernel"], "sm_90")
    wait = "WARPGROUP.DEPBAR.LE gsb0, "
    _, *beside = code.split(wait + "0x1")
    assert len(beside) == 4  # tiles that hide keys and others, in two groups
    of_a_thread = 64 * 128 // 128  # rows, keys and threads
    assert all(part.split(wait)[0].count("MUFU.EX2") >= of_a_thread for part in beside)


def record_launches(
    target: str,
    num_seqs: int,
    num_tokens: int,
    num_heads: int,
    num_k_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    *,
    gluon: bool = True,
) -> dict[str, Launch]:
    """What the launcher launches for k and v that are slices of one projection."""
    from torch_hybrid.ops.ragged_attention import _triton

    q = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device="meta")
    kv = torch.empty(num_tokens, num_k_heads, head_dim + v_head_dim, dtype=dtype, device="meta")
    offsets = torch.empty(num_seqs + 1, dtype=torch.int32, device="meta")
    with launches_on(target, gluon=gluon) as launches:
        k, v = kv.split([head_dim, v_head_dim], 2)
        _triton.ragged_attention_with_lse(
            RaggedAttentionWithLse(q, k, v, offsets, offsets, causal=True, scale=1.0, impl="triton")
        )
    return launches
