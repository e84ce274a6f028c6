"""Linear layers whose weights are numbers of 8 or 4 bits with scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.select import select
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.formats.stored_weights import depth_of, features_of, name_of
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS, linear


class ScaledLinear(nn.Module):
    """``x @ worth.T + bias``, of a weight whose numbers are worth themselves times scales.

    Args:
        weight: [outputs, inputs] float8_e4m3fn or int8, or [outputs, inputs / 2] uint8 of two
            numbers each.
        scales: float32; of each 128 x 128 numbers, which checkpoints call weight_scale_inv,
            [ceil(outputs / 128), ceil(inputs / 128)]; of int8 [outputs]; of uint8
            [outputs, inputs / group].
        bias: [outputs], or None.
        dtype: of inputs and outputs.
        impl: an implementation of ``linear``, or "auto": the first that can serve the weight as it
            is now. A runner chooses anew, by its ``Backends``.

    Attributes:
        choice: what is called.
    """

    op = "linear"
    implementations = IMPLEMENTATIONS

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape[0], depth_of(weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.dtype = dtype
        self.choice = select(self.op, IMPLEMENTATIONS, self.need, impl)

    @property
    def need(self) -> Need:
        """What serves the weight, where it is now."""
        features = features_of(self.weight.dtype)
        return Need(device=self.weight.device, dtype=self.dtype, features=features)

    @property
    def kind(self) -> str:
        """What a runner chooses an implementation for."""
        return f"{name_of(self.weight.dtype)} {self.op}"

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, self.in_features)
        if rows.dtype != self.dtype:  # under autocast
            rows = rows.to(self.dtype)
        y = linear(rows, [self.weight], [self.bias], scales=[self.scales], impl=self.choice.impl)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As ``nn.Linear`` has it."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
