"""Attention within packed sequences, by torch's kernels, against one T x T mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_hybrid.training.packed_attention import _masked, packed_attention

OFFSETS = torch.tensor([0, 1, 1, 40, 47, 47], dtype=torch.int32)
SHAPES = {"grouped": (4, 2, 16, 16), "narrow values": (2, 2, 24, 16), "wide values": (2, 2, 8, 24)}


def make_inputs(shape: str = "grouped", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Make q, k and v of 47 tokens in 3 sequences, two more are empty."""
    num_heads, num_kv_heads, k_dim, v_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    sizes = (num_heads, k_dim), (num_kv_heads, k_dim), (num_kv_heads, v_dim)
    return [
        torch.randn(47, *size, generator=generator, dtype=dtype).requires_grad_() for size in sizes
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_those_of_a_mask(shape: str):
    q, k, v = make_inputs(shape)
    out = packed_attention(q, k, v, OFFSETS, scale=0.3)
    masked = _masked(q, k, v, OFFSETS, 0.3, 0.0)
    torch.testing.assert_close(out, masked)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    for mine, other in zip(
        torch.autograd.grad((out * weight).sum(), (q, k, v)),
        torch.autograd.grad((masked * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_bits_that_it_has_alone(dtype: torch.dtype):
    q, k, v = make_inputs(dtype=dtype)
    out = packed_attention(q, k, v, OFFSETS, scale=0.3)
    alone = [x[1:40].detach().requires_grad_() for x in (q, k, v)]
    whole = torch.tensor([0, 39], dtype=torch.int32)
    out_alone = packed_attention(*alone, whole, scale=0.3)
    assert torch.equal(out[1:40], out_alone)
    packed = torch.autograd.grad(out[1:40].float().square().sum(), (q, k, v))
    single = torch.autograd.grad(out_alone.float().square().sum(), alone)
    assert all(torch.equal(x[1:40], y) for x, y in zip(packed, single, strict=True))


def test_opcheck():
    args = (*make_inputs(), OFFSETS, 0.3)
    torch.library.opcheck(torch.ops.torch_hybrid.packed_attention.default, args)


def test_dropout_drops_weights_within_sequences():
    q, k, v = make_inputs()
    torch.manual_seed(0)
    out = packed_attention(q, k, v, OFFSETS, scale=0.3, dropout=0.5)
    first = packed_attention(q, k, v, OFFSETS, scale=0.3)[0]
    kept = torch.isclose(out[0], 2 * first).all(-1)
    assert (kept | out[0].eq(0).all(-1)).all()
    assert 0 < kept.sum() < len(kept)


def test_second_derivatives_are_refused():
    q, k, v = make_inputs()
    out = packed_attention(q, k, v, OFFSETS, scale=0.3)
    grad = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()
