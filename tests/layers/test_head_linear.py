"""A linear layer for each head, as a module."""

from __future__ import annotations

import torch
from torch import nn

from torch_hybrid.layers.head_linear import HeadLinear


def test_a_sum_with_a_bias_is_rounded_once():
    """Rounded before the bias too, a quarter of the numbers are others."""
    torch.manual_seed(0)
    weight, bias = torch.randn(3, 16, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    layer, x = (
        HeadLinear(nn.Parameter(weight), nn.Parameter(bias)),
        torch.randn(50, 3, 16).bfloat16(),
    )
    exact = torch.einsum("thk,hkn->thn", x.double(), weight.double()) + bias.double()
    assert (layer(x) != exact.bfloat16()).float().mean() < 0.01
