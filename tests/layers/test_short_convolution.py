"""The gated short convolution as a module of one's own, without a model or a runner."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import assert_every_parameter_matters, run
from torch_hybrid.layers import ShortConvolution

DIM = 24
SPEC = th.ShortConvolutionSpec(channels=32, conv_width=7)


def make(*, bias: bool) -> ShortConvolution:
    torch.manual_seed(0)
    return ShortConvolution(DIM, SPEC, bias=bias).requires_grad_(False)


def by_definition(layer: ShortConvolution, x: Tensor) -> Tensor:
    before, after, mixed = layer.in_proj(x).chunk(3, dim=-1)
    padded = F.pad((before * mixed).T, (SPEC.conv_width - 1, 0))
    convolved = F.conv1d(padded, layer.conv_weight[:, None], layer.conv_bias, groups=SPEC.channels)
    return layer.out_proj(after * convolved.T)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lengths", [[30], [1, 5, 1, 1, 9], [1] * 4], ids=str)
def test_pieces_equal_the_definition(lengths: list[int], bias: bool):
    layer = make(bias=bias)
    x = torch.randn(sum(lengths), DIM)
    torch.testing.assert_close(run(layer, x, lengths), by_definition(layer, x))


def test_every_parameter_matters():
    assert_every_parameter_matters(make(bias=True), DIM)


def test_it_keeps_the_window_of_its_convolution_and_nothing_else():
    table = th.LayerTable.from_specs([SPEC])
    cache = th.HybridCache(table, max_seqs=2, kv_tokens=16, page_size=16)
    assert [list(pool.shape) for pool in cache.pool_tensors()] == [[3, 6, 32]]
    assert [cost.per_token for cost in cache.costs()] == [0]


def test_channels_that_ranks_do_not_divide():
    message = "the number of ranks must divide channels, got 3 ranks and 32"
    with pytest.raises(th.UnsupportedError, match=message):
        SPEC.divided(3)
