"""Linear layers whose weights are numbers of 8 bits, each with the scale of its block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_hybrid.backends.select import select
from torch_hybrid.ops.capability import Need
from torch_hybrid.ops.linear.op import FEATURES, IMPLEMENTATIONS, linear


class BlockFP8Linear(nn.Module):
    """``x @ (weight * scale).T + bias``, a scale for each 128 x 128 numbers of the weight.

    Args:
        weight: [outputs, inputs] float8_e4m3fn.
        weight_scale_inv: [ceil(outputs / 128), ceil(inputs / 128)] float32, which checkpoints call
            so; numbers are multiplied by it.
        bias: [outputs], or None.
        dtype: of inputs and outputs.
        impl: an implementation of ``linear``, or "auto": the first that can serve the weight as it
            is now. A runner chooses anew, by its ``Backends``.

    Attributes:
        choice: what is called.
    """

    op = "linear"
    kind = "fp8 linear"
    implementations = IMPLEMENTATIONS

    def __init__(
        self,
        weight: Tensor,
        weight_scale_inv: Tensor,
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(weight_scale_inv, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.dtype = dtype
        self.choice = select(self.op, IMPLEMENTATIONS, self.need, impl)

    @property
    def need(self) -> Need:
        """What serves the weight, where it is now."""
        return Need(device=self.weight.device, dtype=self.dtype, features=FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, self.in_features)
        if rows.dtype != self.dtype:  # under autocast
            rows = rows.to(self.dtype)
        y = linear(
            rows,
            [self.weight],
            [self.bias],
            scales=[self.weight_scale_inv],
            impl=self.choice.impl,
        )
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As ``nn.Linear`` has it."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class SideBySide(nn.Module):
    """Linear layers of one input, the outputs of one after those of the other.

    What a merged projection is where some of its rows have 8 bits and others do not, or where
    their blocks do not follow on one another.
    """

    def __init__(self, parts: Sequence[nn.Linear | BlockFP8Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs of all parts]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def columns(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """The outputs in stretches of some widths; those of one part are not copied."""
        outputs = [part(x) for part in self.parts]
        found = []
        for width in widths:
            stretch: list[Tensor] = []
            while width > 0:
                first = outputs.pop(0)
                taken = min(width, first.shape[-1])
                stretch.append(first.narrow(-1, 0, taken))
                if taken < first.shape[-1]:
                    outputs.insert(0, first.narrow(-1, taken, first.shape[-1] - taken))
                width -= taken
            found.append(stretch[0] if len(stretch) == 1 else torch.cat(stretch, dim=-1))
        return found


def columns(projection: nn.Module, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """The outputs of a projection of x in stretches of some widths, which are all of them."""
    if isinstance(projection, SideBySide):
        return projection.columns(x, widths)
    split: Sequence[Tensor] = projection(x).split(list(widths), dim=-1)
    return split
