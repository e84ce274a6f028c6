"""The recurrent block of Griffin as a module of one's own, without a model or a runner."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import assert_every_parameter_matters, run
from torch_hybrid.layers import RgLru

DIM = 32
SPEC = th.RgLruSpec(num_heads=4, head_dim=12, conv_width=4)


def make() -> RgLru:
    torch.manual_seed(0)
    layer = RgLru(DIM, SPEC).requires_grad_(False)
    layer.gates.bias.normal_()
    return layer


def by_definition(layer: RgLru, x: Tensor) -> Tensor:
    mixed, y = layer.in_proj(x).chunk(2, dim=-1)
    padded = F.pad(mixed.T, (SPEC.conv_width - 1, 0))
    mixed = F.conv1d(padded, layer.conv_weight[:, None], layer.conv_bias, groups=SPEC.channels).T
    heads = mixed.unflatten(-1, (SPEC.num_heads, -1))
    gates = torch.einsum("thb,hbo->tho", heads, layer.gates.weight) + layer.gates.bias
    input_gate, recurrent_gate = (part.flatten(1).sigmoid() for part in gates.chunk(2, dim=-1))
    decay = (-8 * recurrent_gate * F.softplus(layer.a_param)).exp()
    added = input_gate * mixed
    states = [added[0]]
    for t in range(1, len(x)):
        states.append(decay[t] * states[-1] + (1 - decay[t] ** 2).sqrt() * added[t])
    return layer.out_proj(torch.stack(states) * F.gelu(y, approximate="tanh"))


@pytest.mark.parametrize("lengths", [[30], [1, 5, 1, 1, 9], [1] * 4], ids=str)
def test_pieces_equal_the_definition(lengths: list[int]):
    layer, x = make(), torch.randn(sum(lengths), DIM)
    torch.testing.assert_close(run(layer, x, lengths), by_definition(layer, x))


def test_every_parameter_matters():
    assert_every_parameter_matters(make(), DIM)


def test_what_it_keeps():
    """The window of its convolution, and one number for each channel."""
    table = th.LayerTable.from_specs([SPEC])
    cache = th.HybridCache(table, max_seqs=2, kv_tokens=16, page_size=16)
    assert [list(pool.shape) for pool in cache.pool_tensors()] == [[3, 3, 48], [3, 48]]
    assert [cost.per_token for cost in cache.costs()] == [0]


def test_an_open_gate_decays_as_published_models_do():
    decay = (-8 * F.softplus(make().a_param)).exp()
    assert 0.9 - 1e-5 <= decay.min() < 0.92
    assert 0.98 < decay.max() <= 0.999 + 1e-5


def test_heads_that_ranks_do_not_divide():
    message = "the number of ranks must divide num_heads, got 3 ranks and 4"
    with pytest.raises(th.UnsupportedError, match=message):
        SPEC.divided(3)
