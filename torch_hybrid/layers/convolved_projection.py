"""Queries, keys and values of compressed convolutional attention (ZAYA), as a module of its own."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan, convolve
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.head_linear import HeadLinear
from torch_hybrid.layers.mixer import Blocks, Divisible, empty_parameter
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ranks import Ranks, own_means
from torch_hybrid.specs import ConvolvedProjectionSpec


class ConvolvedProjection(Divisible):
    """Projection, two causal convolutions of queries and keys, and a delay of half of the values.

    One input projection gives ``[q | k | v]``. With heads h, filters w of channels and W of heads,
    and inputs before a sequence zero::

        c[t, h] = b[h] + sum_i w[h, i] * qk[t - i, h]       (b[h] before a sequence)
        y[t, h] = B[h] + sum_j W[h, j] @ c[t - j, h]
        q[t, h] = y[t, h] + (q[t, h] + k[t, its group]) / 2
        k[t, g] = y[t, g] + (mean of q[t] over the group g + k[t, g]) / 2
        v[t]    = [first half of the channels of v[t] | second half of v[t - 1]]

    One ``causal_conv1d`` computes all c[t - j] and the delay, so that its inputs are the only
    state. W is a linear layer per head, of the head's c[t - j] side by side.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        dtype, device: dtype and device of the parameters.
    """

    def __init__(
        self,
        dim: int,
        spec: ConvolvedProjectionSpec,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec
        heads, taps, width = spec.num_heads, spec.head_width, spec.head_dim
        self.in_proj = nn.Linear(dim, sum(self._widths), bias=False, dtype=dtype, device=device)
        self.conv_weight = parameter(spec.conv_channels, spec.conv_width)
        self.conv_bias = parameter(spec.conv_channels)
        self.heads = HeadLinear(parameter(heads, taps * width, width), parameter(heads, width))
        self._group_means = own_means
        self.reset_parameters()

    @property
    def _widths(self) -> list[int]:
        return [
            heads * self.spec.head_dim for heads in (self.spec.num_heads, self.spec.num_kv_heads)
        ]

    def reset_parameters(self) -> None:
        """Initialise the convolutions as torch does; the projection has initialised itself."""
        spec, like = self.spec, self.conv_weight
        channels = spec.num_heads * spec.head_dim
        convolution = nn.Conv1d(
            channels,
            channels,
            spec.channel_width,
            groups=channels,
            dtype=like.dtype,
            device=like.device,
        )
        assert convolution.bias is not None
        self.set_channels(convolution.weight.detach().squeeze(1), convolution.bias.detach())
        self.heads.reset_parameters()

    def set_channels(self, weight: Tensor, bias: Tensor) -> None:
        """Set the channels' filters [C, channel_width] and biases [C], also weights that are not
        read yet."""
        spec = self.spec
        one = torch.ones_like(weight[: spec.num_kv_heads * spec.head_dim // 2, :1])

        def tap(filters: Tensor, back: int) -> Tensor:
            none = filters[:, :1] * 0.0  # where a weight is unread, there are no other zeros
            late = spec.conv_width - filters.shape[1] - back
            return torch.cat([*[none] * late, filters, *[none] * back], dim=1)

        def by_head(channels: Tensor) -> Tensor:
            return channels.view(spec.num_heads, 1, spec.head_dim, *channels.shape[1:])

        taps = [by_head(tap(weight, back)) for back in reversed(range(spec.head_width))]
        values = [tap(one, back) for back in (0, 1)]
        biases = [by_head(bias)] * spec.head_width
        no_bias = [(one * 0.0).squeeze(1)] * 2
        self.conv_weight = _parameter(torch.cat([torch.cat(taps, dim=1).flatten(0, 2), *values]))
        self.conv_bias = _parameter(torch.cat([torch.cat(biases, dim=1).flatten(), *no_bias]))

    @in_own_dtype(1)
    def forward(
        self, x: Tensor, plan: RecurrentPlan, cache: LayerCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the tokens of a step.

        Args:
            x: [T, dim], the sequences packed as ``plan`` says.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the slots that the plan names.

        Returns:
            q [T, Hq, D], k and v [T, Hkv, D].
        """
        spec = self.spec
        heads = [spec.num_q_heads, spec.num_kv_heads]
        projected, v = columns(self.in_proj, x, self._widths)
        qk = projected.unflatten(-1, (spec.num_heads, spec.head_dim))
        taps = qk[:, :, None].expand(-1, -1, spec.head_width, -1).flatten(1)
        mixed = convolve(
            torch.cat([taps, v], dim=-1),
            self.conv_weight,
            self.conv_bias,
            plan,
            cache,
            activation="none",
        )
        taps, v = mixed.split([taps.shape[-1], v.shape[-1]], dim=-1)
        mixed_q, mixed_k = self.heads(taps.unflatten(-1, (spec.num_heads, -1))).split(heads, dim=1)
        q, k = qk.split(heads, dim=1)
        groups = (q.unflatten(1, (spec.num_kv_heads, -1)) + k[:, :, None]) * 0.5
        means = self._group_means(groups.mean(dim=2))
        return mixed_q + groups.flatten(1, 2), mixed_k + means, v.unflatten(-1, k.shape[1:])

    def blocks(self) -> dict[str, Blocks]:
        spec = self.spec
        q, k, width = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
        taps = width * spec.head_width
        channels: Blocks = [(q, taps), (k, taps), (k, width)]
        return {
            "in_proj": [(q, width), (k, width), (k, width)],
            "conv_weight": channels,
            "conv_bias": channels,
            "heads": [(q, 1), (k, 1)],
        }

    def shard(self, ranks: Ranks) -> Self:
        part = super().shard(ranks)
        part._group_means = partial(ranks.mean_of_groups, num_groups=self.spec.num_kv_heads)
        return part


def _parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
