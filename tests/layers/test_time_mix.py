"""RWKV's time mixing as a module of one's own, without a model or a runner."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_hybrid as th
from tests.layers.one_layer import assert_every_parameter_matters, run
from torch_hybrid.layers import TimeMix

DIM = 32
SPEC = th.TimeMixSpec(dim=DIM, channels=40)


def make() -> TimeMix:
    torch.manual_seed(0)
    layer = TimeMix(SPEC).requires_grad_(False)
    layer.time_first.normal_()
    return layer


def by_definition(layer: TimeMix, x: Tensor) -> Tensor:
    """Each token's mean of all values up to it, in float64."""
    layer, x = layer.double(), x.double()
    before = F.pad(x, (0, 0, 1, 0))[:-1]
    key, value, receptance = (mix * x + (1 - mix) * before for mix in layer.shift.mixes)
    k, v = layer.key(key), layer.value(value)
    out = []
    for t in range(len(x)):
        age = torch.arange(t - 1, -1, -1)[:, None]
        earlier = k[:t] - age * layer.time_decay.exp()
        weights = torch.cat([earlier, k[t : t + 1] + layer.time_first]).softmax(0)
        out.append((weights * v[: t + 1]).sum(0))
    return layer.out_proj(layer.receptance(receptance).sigmoid() * torch.stack(out))


@pytest.mark.parametrize("lengths", [[30], [1, 5, 1, 1, 9], [1] * 4], ids=str)
def test_pieces_equal_the_definition(lengths: list[int]):
    layer, x = make(), torch.randn(sum(lengths), DIM)
    actual = run(layer, x, lengths)
    torch.testing.assert_close(actual, by_definition(layer, x).float())


def test_every_parameter_matters():
    assert_every_parameter_matters(make(), DIM)


def test_what_it_keeps():
    """The last input, and three numbers for each channel."""
    table = th.LayerTable.from_specs([SPEC])
    cache = th.HybridCache(table, max_seqs=2, kv_tokens=16, page_size=16)
    assert [list(pool.shape) for pool in cache.pool_tensors()] == [[3, 1, 32], [3, 3, 40]]
    assert [cost.per_token for cost in cache.costs()] == [0]


def test_channels_that_ranks_do_not_divide():
    message = "the number of ranks must divide channels, got 3 ranks and 40"
    with pytest.raises(th.UnsupportedError, match=message):
        SPEC.divided(3)
    assert SPEC.divided(4) == th.TimeMixSpec(dim=DIM, channels=10)
