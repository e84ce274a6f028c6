"""The Mamba layer as a module of one's own, without a model or a runner."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import assert_every_parameter_matters, run
from torch_hybrid.layers import Mamba

DIM = 32
SPEC = th.MambaSpec(channels=40, state_dim=16, dt_rank=6, conv_width=4)
SPECS = {
    "without norms": SPEC,
    "norms": replace(SPEC, norm_eps=1e-2),
    "heads": replace(SPEC, num_heads=4),
}


def make(spec: th.MambaSpec, *, bias: bool = True, conv_bias: bool = True) -> Mamba:
    torch.manual_seed(0)
    layer = Mamba(DIM, spec, bias=bias, conv_bias=conv_bias).requires_grad_(False)
    layer.dt_bias += 4.0  # a fresh layer forgets too slowly for a test
    return layer


def by_definition(layer: Mamba, x: Tensor) -> Tensor:
    """Token by token in float64."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    mixed, z = layer.in_proj(x).chunk(2, dim=-1)
    padded = F.pad(mixed.T, (spec.conv_width - 1, 0))
    mixed = F.conv1d(padded, layer.conv_weight[:, None], layer.conv_bias, groups=spec.channels)
    mixed = F.silu(mixed.T)
    widths, heads = [spec.dt_rank, spec.state_dim, spec.state_dim], spec.num_heads
    if heads == 1:
        parts = [part[:, None] for part in layer.x_proj(mixed).split(widths, dim=-1)]
    else:
        of_heads = mixed.unflatten(-1, (heads, -1))
        parts = torch.einsum("thk,hkn->thn", of_heads, layer.x_proj.weight).split(widths, dim=-1)
    if spec.norm_eps is not None:
        rms = [(part.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() for part in parts]
        parts = [part / by for part, by in zip(parts, rms, strict=True)]
    dt, B, C = parts
    weight = layer.dt_proj.weight.T[None] if heads == 1 else layer.dt_proj.weight
    dt = torch.einsum("thk,hkn->thn", dt, weight)
    step = F.softplus(dt.flatten(1) + layer.dt_bias)
    B, C = (part.repeat_interleave(spec.channels // heads, dim=1) for part in (B, C))
    state, out = torch.zeros(spec.channels, spec.state_dim, dtype=torch.float64), []
    for t in range(len(x)):
        decay = (-layer.A_log.exp() * step[t, :, None]).exp()
        state = decay * state + (step[t] * mixed[t])[:, None] * B[t]
        out.append((state * C[t]).sum(-1) + layer.D * mixed[t])
    return layer.out_proj(torch.stack(out) * F.silu(z))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_definition(name: str, has_bias: bool):
    layer = make(SPECS[name], bias=has_bias, conv_bias=has_bias)
    x = torch.randn(70, DIM)
    expected = by_definition(layer, x).float()
    for lengths in ([70], [33, 3, 34], [64, 1, 1, 1, 1, 1, 1]):
        torch.testing.assert_close(run(layer, x, lengths), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_matters(name: str):
    assert_every_parameter_matters(make(SPECS[name]), DIM)


def test_channels_that_ranks_do_not_divide():
    message = "the number of ranks must divide channels, got 3 ranks and 40"
    with pytest.raises(th.UnsupportedError, match=message):
        SPEC.divided(3)
    message = "the number of ranks must divide num_heads, got 8 ranks and 4"
    with pytest.raises(th.UnsupportedError, match=message):
        SPECS["heads"].divided(8)


def test_channels_that_heads_do_not_divide():
    with pytest.raises(ValueError, match="multiple of num_heads, got 40 and 3"):
        replace(SPEC, num_heads=3)
