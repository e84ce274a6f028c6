"""Linear layer with a weight for each head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torch_hybrid.backends.select import Choice
from torch_hybrid.ops.core.capability import Implementation, Need
from torch_hybrid.ops.head_linear.op import IMPLEMENTATIONS, head_linear, is_faster_than_bmm
from torch_hybrid.ranks import Block, Ranks

_TORCH_FIRST = {name: IMPLEMENTATIONS[name] for name in ("torch", "cpp", "triton")}


class HeadLinear(nn.Module):
    """``x[:, h] @ weight[h] + bias[h]`` for each head h.

    Args:
        weight: [H, inputs, outputs].
        bias: [H, outputs], or None.

    Attributes:
        choice: chosen implementation: torch's batched GEMM, which the compiler sees, unless a
            runner chooses a batch-invariant one, or one that is faster.
    """

    op = kind = "head_linear"

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.choice = Choice(op=self.op, impl="torch")

    def reset_parameters(self) -> None:
        """Initialise as torch initialises a linear layer."""
        bound = self.weight.shape[1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        """Implementations of the op, the fastest first."""
        weight = self.weight
        return IMPLEMENTATIONS if is_faster_than_bmm(weight.device, weight.dtype) else _TORCH_FIRST

    @property
    def need(self) -> Need:
        """Need of the weight, on the device where it is now."""
        return Need(device=self.weight.device, dtype=self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Project x [T, H, inputs] -> [T, H, outputs], head by head."""
        if self.choice.impl != "torch":
            weight = self.weight.transpose(1, 2)
            return head_linear(x, weight, impl=self.choice.impl, bias=self.bias)
        heads = x.transpose(0, 1)
        if self.bias is None:
            return torch.bmm(heads, self.weight).transpose(0, 1)
        # One rounding, as torch's linear layers and the models that this serves have it.
        return torch.baddbmm(self.bias[:, None], heads, self.weight).transpose(0, 1)

    def shard(self, ranks: Ranks, blocks: list[Block]) -> HeadLinear:
        """Make a layer of this rank's heads, cut out of each block."""
        bias = None if self.bias is None else ranks.parameter(self.bias, blocks)
        return HeadLinear(ranks.parameter(self.weight, blocks), bias)
