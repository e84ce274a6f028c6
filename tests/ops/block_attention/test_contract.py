"""The contract of block_attention, held by every implementation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.block_attention.cases import CASES, SMALL, Case, Inputs, make_inputs
from tests.ops.contract import assert_within_budget, impl_fixture
from torch_hybrid.ops.block_attention import block_attention, reference
from torch_hybrid.ops.block_attention.op import IMPLEMENTATIONS
from torch_hybrid.ops.core.capability import BATCH_INVARIANT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
impl = impl_fixture(IMPLEMENTATIONS)


def attend(inputs: Inputs, impl: str) -> tuple[Tensor, Tensor]:
    """The output, and the pool afterwards."""
    args, options = inputs.args(), {"block_size": inputs.block_size, "scale": inputs.scale}
    return block_attention(*args, **options, impl=impl), args[3]


@cache
def expected_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The reference in float64 and in ``dtype``."""
    inputs = make_inputs(case, dtype=dtype)
    return reference.block_attention(inputs.exact()), reference.block_attention(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(impl: str, name: str, dtype: str):
    if DTYPES[dtype] not in IMPLEMENTATIONS[impl].capability.dtypes:
        pytest.skip(f"{impl} has no {dtype}")
    case = CASES[name]
    out, _ = attend(make_inputs(case, dtype=DTYPES[dtype]), impl)
    assert_within_budget(out, *expected_of(case, DTYPES[dtype]))


@pytest.mark.parametrize("seq_len", [1, 3, 4, 65])
def test_all_blocks_are_dense_attention(impl: str, seq_len: int):
    paged = replace(SMALL.pages, lengths=((seq_len, seq_len),))
    case = Case(pages=paged, block_size=4, top_k=20)
    inputs = make_inputs(case)
    out, _ = attend(inputs, impl)
    q, k, v = (x.transpose(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, dense[0].transpose(0, 1), atol=2e-6, rtol=1e-5)


def test_a_query_that_sees_nothing_gets_zeros(impl: str):
    paged = replace(SMALL.pages, lengths=((1, 24), (2, 8)))
    inputs = make_inputs(replace(SMALL, pages=paged))
    out, _ = attend(replace(inputs, blocks=torch.full_like(inputs.blocks, -1)), impl)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert (out[1] != 0).any()  # its own token is in no complete block


def test_large_logits_do_not_overflow(impl: str):
    inputs = make_inputs(SMALL)
    inputs = replace(inputs, q=inputs.q * 1e4)
    assert attend(inputs, impl)[0].isfinite().all()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_equals_whole(impl: str, chunk: int):
    case, total = CASES["long_extend"], min(131, 20 * chunk)
    case = replace(case, pages=replace(case.pages, lengths=((total, total),)))
    whole = make_inputs(case)
    expected, expected_kv = attend(whole, impl)
    outs, kv = whole.in_pieces(chunk, lambda piece: attend(piece, impl))
    torch.testing.assert_close(torch.cat(outs), expected, atol=2e-6, rtol=1e-5)
    if BATCH_INVARIANT in IMPLEMENTATIONS[impl].capability.features:
        assert torch.equal(torch.cat(outs), expected)
    assert torch.equal(kv.view(torch.uint8), expected_kv.view(torch.uint8))


def test_latents_are_keys_that_are_their_values(impl: str):
    case = CASES["odd_latents"]
    inputs = make_inputs(case)
    k, kv = inputs.k[:, None], inputs.kv[:, :, None]
    twice = replace(inputs, k=k, v=k, kv=torch.stack([kv, kv]))
    assert torch.equal(attend(inputs, impl)[0], attend(twice, impl)[0])


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, **changes: object) -> str:
    inputs = make_inputs(SMALL)
    tensors = {name: value for name, value in changes.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in changes.items() if name not in tensors}
    options = {"block_size": 4, "scale": 1.0, "impl": impl, **options}
    return error_text(ValueError, block_attention, *replace(inputs, **tensors).args(), **options)


def test_error_texts():
    good = make_inputs(SMALL)
    errors = [
        failing("torch", q=good.q[:, :3]),
        failing("torch", block_size=5),
        failing("torch", scale=0.0),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
q heads must be a multiple of the 2 key heads, got 3
block_size must divide the 16 tokens of a page, got 5
scale must be positive, got 0.0""",
    )
