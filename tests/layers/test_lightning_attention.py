"""The lightning-attention layer as a module of one's own, without a model or a runner."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import run
from torch_hybrid.layers import LightningAttention
from torch_hybrid.layers.lightning_attention import alibi_slopes
from torch_hybrid.layers.rotary import Rotary, rotate_halves
from torch_hybrid.specs import LightningSpec

DIM = 32
PLAIN = LightningSpec(num_heads=6, head_dim=12)
CASES = {
    "plain": PLAIN,
    "as MiniMax": replace(PLAIN, activation="silu"),
    "as Ring": replace(PLAIN, qk_norm=True, norm_groups=3, scale=12**-0.5, norm_eps=0.01),
}


def make(spec: LightningSpec) -> LightningAttention:
    torch.manual_seed(0)
    layer = LightningAttention(DIM, spec, alibi_slopes(spec.num_heads)).requires_grad_(False)
    for name, weight in layer.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    return layer


def by_definition(layer: LightningAttention, x: Tensor) -> Tensor:
    """Token by token in float64, head by head."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * weight

    qkv, gate = layer.in_proj(x).split([3 * spec.channels, spec.channels], dim=-1)
    qkv = F.silu(qkv) if spec.activation == "silu" else qkv
    q, k, v = (part.unflatten(-1, (spec.num_heads, -1)) for part in qkv.chunk(3, dim=-1))
    if spec.qk_norm:
        q, k = norm(q, layer.q_norm_weight), norm(k, layer.k_norm_weight)
    decay = torch.exp(-layer.slopes)[:, None, None]
    state, out = torch.zeros(spec.state_shape, dtype=torch.float64), []
    for t in range(len(x)):
        state = decay * state + v[t][:, :, None] * k[t][:, None, :]
        out.append(spec.scale * torch.einsum("hvk,hk->hv", state, q[t]))
    groups = torch.stack(out).flatten(1).unflatten(-1, (spec.norm_groups, -1))
    o = norm(groups, layer.norm_weight.unflatten(0, (spec.norm_groups, -1))).flatten(1)
    return layer.out_proj(o * gate.sigmoid())


@pytest.mark.parametrize("case", CASES)
def test_whole_in_chunks_and_token_by_token(case: str):
    layer, x = make(CASES[case]), torch.randn(90, DIM)
    exact = by_definition(layer, x)
    for lengths in ([90], [70, 1, 1, 18], [1] * 90):
        error = (run(layer, x, lengths) - exact).abs().max() / exact.abs().max()
        assert error < 1e-5, f"pieces of {lengths[:4]}: {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shares_groups", [False, True], ids=["own groups", "groups of ranks"])
@pytest.mark.parametrize("case", CASES)
def test_a_decode_step_in_one_op_is_that_of_its_parts(
    case: str, shares_groups: bool, dtype: torch.dtype
):
    layer = make(CASES[case]).to(dtype)
    layer._shares_groups = shares_groups
    x = torch.randn(9, DIM, dtype=dtype)
    whole, parts = (
        run(layer, x, [5, 1, 1, 1, 1], th.Backends(ops={op: "torch"}))
        for op in ("lightning_step", "decode ssd")
    )
    torch.testing.assert_close(whole, parts)


def test_decays_stay_in_float32_when_the_weights_are_cast():
    slopes = alibi_slopes(6) / 3
    layer = LightningAttention(DIM, PLAIN, slopes, dtype=torch.bfloat16)
    assert torch.equal(layer.slopes, slopes)
    layer = LightningAttention(DIM, PLAIN, slopes).bfloat16()
    assert layer.in_proj.weight.dtype is torch.bfloat16
    assert torch.equal(layer.slopes, slopes)
    assert layer.to("meta").slopes.is_meta


def test_slopes_of_another_number_of_heads_are_refused():
    with pytest.raises(ValueError, match=r"slopes must have shape \[6\], got \[4\]"):
        LightningAttention(DIM, PLAIN, alibi_slopes(4))


def test_facts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="norm_groups must divide the 72 channels, got 5"):
        replace(PLAIN, norm_groups=5)
    with pytest.raises(ValueError, match="activation must be 'none' or 'silu', got 'gelu'"):
        replace(PLAIN, activation="gelu")


def test_rotations_keep_relative_positions():
    q, k = torch.randn(2, 1, 3, 8, dtype=torch.float64).unbind(0)

    def dots(position: int, dim: int) -> Tensor:
        angles = torch.outer(torch.tensor([position, position + 5.0]), torch.rand(dim // 2))
        tables = [Rotary(a.cos()[None].double(), a.sin()[None].double()) for a in angles]
        return (rotate_halves(q, tables[0]) * rotate_halves(k, tables[1])).sum(-1)

    for dim in (4, 8):
        torch.manual_seed(0)
        first = dots(3, dim)
        torch.manual_seed(0)
        torch.testing.assert_close(dots(40, dim), first, rtol=1e-5, atol=1e-5)
        assert (first - (q * k).sum(-1)).abs().max() > 1e-2
