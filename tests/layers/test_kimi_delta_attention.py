"""The Kimi-delta-attention layer as a module of one's own, without a model or a runner."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import run
from torch_hybrid.layers import KimiDeltaAttention
from torch_hybrid.ops.delta_rule._composed import kimi_log_decay
from torch_hybrid.specs import KimiDeltaSpec

DIM = 32
SPEC = KimiDeltaSpec(num_heads=3, head_k_dim=12, head_v_dim=20, conv_width=4)
BOUNDED = replace(SPEC, gate_lower_bound=-5.0)
CASES = {
    "low rank": (SPEC, 8),
    "full rank": (SPEC, None),
    "bounded": (BOUNDED, None),
    "bounded, low rank": (BOUNDED, 8),
}


def make(case: str) -> KimiDeltaAttention:
    torch.manual_seed(0)
    spec, rank = CASES[case]
    layer = KimiDeltaAttention(DIM, spec, gate_rank=rank).requires_grad_(False)
    layer.norm_weight.uniform_(0.5, 1.5)
    return layer


def by_definition(layer: KimiDeltaAttention, x: Tensor) -> Tensor:
    """Token by token in float64, head by head."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    mixed, f, gate, b = layer.in_proj(x).split(layer._widths, dim=-1)
    padded = F.pad(mixed, (0, 0, spec.conv_width - 1, 0))
    mixed = F.silu((padded.unfold(0, spec.conv_width, 1) * layer.conv_weight).sum(-1))
    q, k, v = mixed.split([spec.k_channels, spec.k_channels, spec.v_channels], dim=-1)
    q, k, v = (part.unflatten(-1, (spec.num_heads, -1)) for part in (q, k, v))
    q, k = F.normalize(q, dim=-1) / spec.head_k_dim**0.5, F.normalize(k, dim=-1)
    step = layer.f_b_proj(f).unflatten(-1, (spec.num_heads, -1)) + layer.dt_bias
    rate = layer.A_log.exp()[:, None]
    decay = -rate * F.softplus(step)
    if spec.gate_lower_bound is not None:
        decay = spec.gate_lower_bound * torch.sigmoid(rate * step)
    beta = b.sigmoid()
    state, out = torch.zeros(spec.state_shape, dtype=torch.float64), []
    for t in range(len(x)):
        state = state * decay[t].exp()[:, None, :]
        update = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + update[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
    o = torch.stack(out)
    o = o / (o.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * layer.norm_weight
    return layer.out_proj(o.flatten(1) * layer.g_b_proj(gate).sigmoid())


@pytest.mark.parametrize("case", CASES)
def test_whole_in_chunks_and_token_by_token(case: str):
    layer, x = make(case), torch.randn(90, DIM)
    exact = by_definition(layer, x)
    for lengths in ([90], [70, 1, 1, 18], [1] * 90):
        error = (run(layer, x, lengths) - exact).abs().max() / exact.abs().max()
        assert error < 1e-5, f"pieces of {lengths[:4]}: {error:.1e}"


@pytest.mark.parametrize("impl", ["cpp", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_a_decode_step_in_one_op_is_that_of_its_parts(case: str, impl: str):
    layer, x, lengths = make(case), torch.randn(8, DIM), [5, 1, 1, 1]
    whole, parts = (
        run(layer, x, lengths, th.Backends(ops={"kimi_delta_step": name}))
        for name in (impl, "composed")
    )
    torch.testing.assert_close(whole, parts)


def test_fresh_decays_have_time_constants_of_one_to_thousands_of_tokens():
    torch.manual_seed(0)
    layer = KimiDeltaAttention(DIM, replace(SPEC, num_heads=64))
    tokens = -1 / kimi_log_decay(torch.zeros(1, 64 * 12), layer.A_log, layer.dt_bias, None)
    assert 0.1 < tokens.min() < 2
    assert 200 < tokens.max() < 5000
