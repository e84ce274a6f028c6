"""RWKV's mixers as modules of one's own, without a model or a runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_hybrid as th
from tests.layers.one_layer import assert_every_parameter_matters, run
from torch_hybrid.layers import ChannelMix, TimeMix

DIM = 32
TIME = th.TimeMixSpec(dim=DIM, channels=40)
CHANNELS = th.ChannelMixSpec(dim=DIM, width=40)


def make_time_mix() -> TimeMix:
    torch.manual_seed(0)
    layer = TimeMix(TIME).requires_grad_(False)
    layer.time_first.normal_()
    return layer


def make_channel_mix() -> ChannelMix:
    torch.manual_seed(0)
    return ChannelMix(CHANNELS).requires_grad_(False)


def time_mix_by_definition(layer: TimeMix, x: Tensor) -> Tensor:
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
    return layer.out_proj(layer.receptance(receptance).sigmoid() * torch.stack(out)).float()


def channel_mix_by_definition(layer: ChannelMix, x: Tensor) -> Tensor:
    before = F.pad(x, (0, 0, 1, 0))[:-1]
    key, receptance = (mix * x + (1 - mix) * before for mix in layer.shift.mixes)
    gate = layer.receptance(receptance).sigmoid()
    return gate * layer.value(layer.key(key).relu() ** 2)


@pytest.mark.parametrize("lengths", [[30], [1, 5, 1, 1, 9], [1] * 4], ids=str)
@pytest.mark.parametrize(
    ("make", "by_definition"),
    [(make_time_mix, time_mix_by_definition), (make_channel_mix, channel_mix_by_definition)],
    ids=["time", "channels"],
)
def test_pieces_equal_the_definition(
    make: Callable[[], Any], by_definition: Callable[[Any, Tensor], Tensor], lengths: list[int]
):
    layer, x = make(), torch.randn(sum(lengths), DIM)
    torch.testing.assert_close(run(layer, x, lengths), by_definition(layer, x))


@pytest.mark.parametrize("make", [make_time_mix, make_channel_mix])
def test_every_parameter_matters(make: Callable[[], Any]):
    assert_every_parameter_matters(make(), DIM)


@pytest.mark.parametrize(
    ("spec", "pools"), [(TIME, [[3, 1, 32], [3, 3, 40]]), (CHANNELS, [[3, 1, 32]])]
)
def test_what_it_keeps(spec: Any, pools: list[list[int]]):
    """The last input, and of time mixing three numbers for each channel."""
    table = th.LayerTable.from_specs([spec])
    cache = th.HybridCache(table, max_seqs=2, kv_tokens=16, page_size=16)
    assert [list(pool.shape) for pool in cache.pool_tensors()] == pools
    assert [cost.per_token for cost in cache.costs()] == [0]


@pytest.mark.parametrize(
    ("spec", "name", "part"),
    [
        (TIME, "channels", th.TimeMixSpec(dim=DIM, channels=10)),
        (CHANNELS, "width", th.ChannelMixSpec(dim=DIM, width=10)),
    ],
)
def test_units_that_ranks_do_not_divide(spec: Any, name: str, part: Any):
    message = f"the number of ranks must divide {name}, got 3 ranks and 40"
    with pytest.raises(th.UnsupportedError, match=message):
        spec.divided(3)
    assert spec.divided(4) == part
