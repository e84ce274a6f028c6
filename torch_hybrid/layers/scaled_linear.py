"""Linear layers with quantized weights: FP8, INT8 or INT4 with scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.select import select
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.formats.stored_weights import depth_of, features_of, name_of
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS, linear


class ScaledLinear(nn.Module):
    """Linear layer with a quantized weight: ``x @ (weight * scales).T + bias``.

    Args:
        weight: [outputs, inputs] float8_e4m3fn (FP8) or int8, or [outputs, inputs / 2] uint8 with
            two INT4 numbers each.
        scales: float32 dequantization scales. FP8: one per block of 128 x 128 (weight_scale_inv in
            checkpoints), [ceil(outputs / 128), ceil(inputs / 128)]. INT8: one per output,
            [outputs]. INT4: one per group of a row, [outputs, inputs / group].
        bias: [outputs], or None.
        dtype: dtype of inputs and outputs.
        impl: an implementation of ``linear``, or "auto", which chooses one that can serve the
            weight as it is now. A runner chooses anew, by its ``Backends``.

    Attributes:
        choice: chosen implementation.
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
        """Need of the weight, on the device where it is now."""
        features = features_of(self.weight.dtype)
        return Need(device=self.weight.device, dtype=self.dtype, features=features)

    @property
    def kind(self) -> str:
        """Name of the modules for which a runner makes one choice."""
        return f"{name_of(self.weight.dtype)} {self.op}"

    def forward(self, x: Tensor) -> Tensor:
        """Project x [..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, self.in_features)
        if rows.dtype != self.dtype:  # under autocast
            rows = rows.to(self.dtype)
        y = linear(rows, [self.weight], [self.bias], scales=[self.scales], impl=self.choice.impl)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Describe the layer by its sizes, as ``nn.Linear`` does."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
