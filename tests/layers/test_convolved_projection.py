"""The projection of convolved queries and keys as a module of one's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import run
from torch_hybrid.layers.convolved_projection import ConvolvedProjection
from torch_hybrid.specs import ConvolvedProjectionSpec

DIM = 24
SIZES = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 8}
WIDTHS = [(2, 2), (4, 3), (1, 1), (1, 2)]


class Flat(ConvolvedProjection):
    """Queries, keys and values side by side."""

    def forward(self, *args: object) -> Tensor:
        return torch.cat([part.flatten(1) for part in super().forward(*args)], dim=-1)


def make(channel_width: int, head_width: int) -> Flat:
    torch.manual_seed(0)
    spec = ConvolvedProjectionSpec(**SIZES, channel_width=channel_width, head_width=head_width)
    layer = Flat(DIM, spec)
    channels = 8 * 8
    layer.filters = torch.randn(channels, channel_width), torch.randn(channels)
    layer.set_channels(*layer.filters)
    return layer.requires_grad_(False)


def by_definition(layer: Flat, x: Tensor) -> Tensor:
    """Filters of channels have biases before the first token too."""
    spec, (weight, bias) = layer.spec, layer.filters
    q, k, v = layer.in_proj(x).split([48, 16, 16], dim=-1)
    padded = F.pad(torch.cat([q, k], -1).T, (spec.channel_width + spec.head_width - 2, 0))
    channels = F.conv1d(padded, weight[:, None], bias, groups=len(weight))
    taps = channels.unfold(-1, spec.head_width, 1).unflatten(0, (8, 8))  # heads, dims, tokens, taps
    mixed = torch.einsum("hdtj,hjde->the", taps, layer.heads.weight.unflatten(1, (-1, 8)))
    mixed += layer.heads.bias
    groups = (q.view(-1, 2, 3, 8) + k.view(-1, 2, 1, 8)) / 2
    late = F.pad(v[:-1, 8:], (0, 0, 1, 0))
    parts = [mixed[:, :6] + groups.flatten(1, 2), mixed[:, 6:] + groups.mean(2)]
    return torch.cat([*(part.flatten(1) for part in parts), v[:, :8], late], dim=-1)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_pieces_equal_the_definition(widths: tuple[int, int]):
    layer, x = make(*widths), torch.randn(16, DIM)
    for lengths in ([16], [1, 5, 1, 1, 8]):
        torch.testing.assert_close(run(layer, x, lengths), by_definition(layer, x))


def test_it_keeps_inputs_and_those_of_drafts():
    spec = make(4, 3).spec
    channels = (8 * 3 + 2) * 8
    assert spec.pools() == {
        "conv": th.specs.Pool((5, channels), per="slot"),
        "records": th.specs.Pool((channels,), per="draft"),
    }


def test_a_fresh_one_has_filters_of_its_widths():
    spec = ConvolvedProjectionSpec(**SIZES, channel_width=2, head_width=2)
    layer = ConvolvedProjection(DIM, spec)
    assert layer.conv_weight.count_nonzero() == 64 * 2 * 2 + 16
    assert layer.conv_bias.count_nonzero() == 64 * 2


def test_heads_that_ranks_do_not_divide():
    spec = make(2, 2).spec
    assert spec.divided(2).conv_channels == spec.conv_channels // 2
    with pytest.raises(th.UnsupportedError, match="must divide num_q_heads, got 4 ranks and 6"):
        spec.divided(4)
