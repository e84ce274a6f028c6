"""Twin of the projection of compressed convolutional attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import (
    Submodule,
    Twin,
    by_head,
    convolved,
    earlier,
    filters_of,
)


class ConvolvedProjection(Twin, of=("ZayaCCAProjection",)):
    """Queries and keys behind two convolutions, and half of the values a token late, as in ZAYA."""

    conv_qk_depthwise: nn.Conv1d
    conv_qk_grouped: nn.Conv1d
    grouped_kernel_size: int
    head_dim: int
    hidden_size: int
    k_proj: Submodule
    num_attention_heads: int
    num_key_value_heads: int
    q_proj: Submodule
    v_proj_current: Submodule
    v_proj_delayed: Submodule

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Map [B, T, D] to q, k and v [B, T, heads, head_dim]; a packing comes as the mask."""
        _cache, mask = args
        if not isinstance(mask, Packing):
            return super().forward(hidden_states, *args, **options)
        qkv = self.projected(hidden_states.flatten(0, 1), mask)
        return tuple(each.unflatten(0, hidden_states.shape[:2]) for each in qkv)

    def projected(self, x: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """Map tokens [T, D] to q, k and v [T, heads, head_dim]."""
        heads = [self.num_attention_heads, self.num_key_value_heads]
        qk = torch.cat([self.q_proj(x), self.k_proj(x)], -1)
        q, k = by_head(qk, self.head_dim).split(heads, 1)
        groups = (q.unflatten(1, (k.shape[1], -1)) + k[:, :, None]) * 0.5
        mixed_q, mixed_k = self.mixed(qk, packing).split(heads, 1)
        late = self.v_proj_delayed(x)
        none = self.v_proj_delayed(x.new_zeros(1, x.shape[-1]))
        v = torch.cat([self.v_proj_current(x), earlier(late, packing, before=none)], -1)
        return mixed_q + groups.flatten(1, 2), mixed_k + groups.mean(2), v.view(k.shape)

    def mixed(self, qk: Tensor, packing: Packing) -> Tensor:
        """Convolve each channel [T, C], then the channels of each head [T, H, K] together."""
        by_channel, by_group = self.conv_qk_depthwise, self.conv_qk_grouped
        assert by_channel.bias is not None
        assert by_group.bias is not None
        x = convolved(by_channel, qk, packing)
        before = by_channel.bias.to(x.dtype)  # what the convolution makes of nothing
        steps = reversed(range(1, self.grouped_kernel_size))
        taps = [*(earlier(x, packing, step, before) for step in steps), x]
        # Dense by head: a product with rows that are not copies them in its backward.
        rows = torch.stack([by_head(tap, self.head_dim).transpose(0, 1) for tap in taps], 2)
        filters = filters_of(by_group).unflatten(0, (-1, self.head_dim))
        bias = by_group.bias.view(-1, 1, self.head_dim)
        weight = filters.transpose(1, 3).flatten(1, 2).to(x.dtype)
        made = torch.baddbmm(bias.to(x.dtype), rows.flatten(2), weight)
        return made.transpose(0, 1)
