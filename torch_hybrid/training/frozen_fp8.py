"""FP8 linear layer of transformers as the frozen base of an adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.formats.block_scales import BLOCK, dequantized


class _Product(torch.autograd.Function):
    """Product with a dequantized weight that only its input has a gradient of.

    Plain autograd would keep every dequantized weight until the backward. This keeps FP8, and
    dequantizes the weight of one layer at a time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """Multiply x [..., K] by weight [N, K]."""
        ctx.save_for_backward(weight, scales)
        return x @ dequantized(weight, scales, x.dtype).T

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Multiply dout [..., N] by weight [N, K]."""
        weight, scales = ctx.saved_tensors
        return dout @ dequantized(weight, scales, dout.dtype), None, None


class FrozenFP8Linear(nn.Linear):
    """FP8 linear layer whose inputs are not rounded and have gradients."""

    weight_scale_inv: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N] by the dequantized weight, in the dtype of x."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        out: Tensor = _Product.apply(x, self.weight, self.weight_scale_inv.float())
        return out if self.bias is None else out + self.bias.to(out.dtype)


def check_blocks(module: Any) -> None:
    """Raise UnsupportedError unless a module's blocks are those that are dequantized here."""
    if module.block_size is None or tuple(module.block_size) != (BLOCK, BLOCK):
        raise UnsupportedError(
            f"FP8 weights train in blocks of {BLOCK} x {BLOCK}, got {module.block_size}"
        )
