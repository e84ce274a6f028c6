"""RWKV's channel mixing as a module of one's own, without a model or a runner."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_hybrid as th
from tests.layers.one_layer import assert_every_parameter_matters, run
from torch_hybrid.layers import ChannelMix

DIM = 32
SPEC = th.ChannelMixSpec(dim=DIM, width=40)


def make() -> ChannelMix:
    torch.manual_seed(0)
    return ChannelMix(SPEC).requires_grad_(False)


def by_definition(layer: ChannelMix, x: Tensor) -> Tensor:
    before = F.pad(x, (0, 0, 1, 0))[:-1]
    key, receptance = (mix * x + (1 - mix) * before for mix in layer.shift.mixes)
    gate = layer.receptance(receptance).sigmoid()
    return gate * layer.value(layer.key(key).relu() ** 2)


@pytest.mark.parametrize("lengths", [[30], [1, 5, 1, 1, 9], [1] * 4], ids=str)
def test_pieces_equal_the_definition(lengths: list[int]):
    layer, x = make(), torch.randn(sum(lengths), DIM)
    torch.testing.assert_close(run(layer, x, lengths), by_definition(layer, x))


def test_every_parameter_matters():
    assert_every_parameter_matters(make(), DIM)


def test_it_keeps_the_last_input_and_nothing_else():
    table = th.LayerTable.from_specs([SPEC])
    cache = th.HybridCache(table, max_seqs=2, kv_tokens=16, page_size=16)
    assert [list(pool.shape) for pool in cache.pool_tensors()] == [[3, 1, 32]]
    assert [cost.per_token for cost in cache.costs()] == [0]


def test_units_that_ranks_do_not_divide():
    message = "the number of ranks must divide width, got 3 ranks and 40"
    with pytest.raises(th.UnsupportedError, match=message):
        SPEC.divided(3)
    assert SPEC.divided(4) == th.ChannelMixSpec(dim=DIM, width=10)
