"""The Mamba2 layer as a module of one's own, without a model or a runner."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import assert_every_parameter_matters, run
from torch_hybrid.layers import Mamba2
from torch_hybrid.specs import Mamba2Spec

DIM = 32
SPEC = Mamba2Spec(
    num_heads=6, head_dim=8, state_dim=12, num_groups=3, conv_width=4, norm_groups=2, dt_max=0.5
)
SPECS = {
    "gate before norm": SPEC,
    "gate after norm": replace(SPEC, gate="after_norm", norm_groups=3),
    "no norm": replace(SPEC, gate="no_norm"),
}


def make(spec: Mamba2Spec, *, bias: bool = True, conv_bias: bool = True) -> Mamba2:
    torch.manual_seed(0)
    return Mamba2(DIM, spec, bias=bias, conv_bias=conv_bias).requires_grad_(False)


def by_definition(layer: Mamba2, x: Tensor) -> Tensor:
    """Token by token in float64, head by head."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    inner, group = spec.inner_dim, spec.num_groups * spec.state_dim
    z, mixed, dt = layer.in_proj(x).split([inner, inner + 2 * group, spec.num_heads], dim=-1)
    padded = torch.nn.functional.pad(mixed, (0, 0, spec.conv_width - 1, 0))
    mixed = (padded.unfold(0, spec.conv_width, 1) * layer.conv_weight).sum(-1)
    if layer.conv_bias is not None:
        mixed = mixed + layer.conv_bias
    v, k, q = torch.nn.functional.silu(mixed).split([inner, group, group], dim=-1)
    dt = torch.nn.functional.softplus(dt + layer.dt_bias).clamp(spec.dt_min, spec.dt_max)
    state = torch.zeros(spec.state_shape, dtype=torch.float64)
    out = []
    for t in range(len(x)):
        heads = spec.num_heads // spec.num_groups
        kt, qt = (w[t].view(spec.num_groups, -1).repeat_interleave(heads, 0) for w in (k, q))
        vt, decay = v[t].view(spec.num_heads, -1), (-layer.A_log.exp() * dt[t]).exp()
        state = decay[:, None, None] * state + (dt[t, :, None] * vt)[:, :, None] * kt[:, None]
        out.append(((state @ qt[..., None])[..., 0] + layer.D[:, None] * vt).flatten())
    return layer.out_proj(gated(layer, torch.stack(out), z))


def gated(layer: Mamba2, y: Tensor, z: Tensor) -> Tensor:
    def norm(y: Tensor) -> Tensor:
        groups = y.unflatten(-1, (layer.spec.norm_groups, -1))
        rms = (groups.square().mean(-1, keepdim=True) + layer.spec.norm_eps).sqrt()
        return (groups / rms).flatten(1) * layer.norm_weight

    gate = torch.nn.functional.silu(z)
    orders = {
        "before_norm": lambda: norm(y * gate),
        "after_norm": lambda: norm(y) * gate,
        "no_norm": lambda: y * gate,
    }
    return orders[layer.spec.gate]()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_definition(name: str, has_bias: bool):
    layer = make(SPECS[name], bias=has_bias, conv_bias=has_bias)
    x = torch.randn(70, DIM)
    expected = by_definition(layer, x).float()
    for lengths in ([70], [33, 3, 34], [64, 1, 1, 1, 1, 1, 1]):
        torch.testing.assert_close(run(layer, x, lengths), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("impl", ["cpp", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_a_decode_step_in_one_op_is_that_of_its_parts(name: str, dtype: torch.dtype, impl: str):
    layer = make(SPECS[name]).to(dtype)
    x = torch.randn(9, DIM, dtype=dtype)
    whole, parts = (
        run(layer, x, [5, 1, 1, 1, 1], th.Backends(ops={"ssd_step": named}))
        for named in (impl, "composed")
    )
    torch.testing.assert_close(whole, parts)


def test_steps_reach_their_upper_limit():
    """Otherwise the limit of this file's facts would go unseen."""
    layer = make(replace(SPEC, dt_max=float("inf")))
    layer.dt_bias.fill_(3.0)
    x = torch.randn(20, DIM)
    free = run(layer, x, [20])
    layer.spec = SPEC
    assert (run(layer, x, [20]) - free).abs().max() > 0.01


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_matters(name: str):
    assert_every_parameter_matters(make(SPECS[name]), DIM)
