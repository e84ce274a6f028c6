"""FP8 linear layer of transformers as the frozen base of an adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.formats.block_scales import BLOCK, dequantized


@torch.library.custom_op("torch_hybrid::frozen_fp8_product", mutates_args=())
def _product(x: Tensor, weight: Tensor, scales: Tensor, of_output: bool) -> Tensor:
    """Multiply x [..., K] by weight [N, K], or if ``of_output`` x [..., N] by its transpose.

    A compiler that sees into it dequantizes once, and keeps the result until the backward.
    """
    worth = dequantized(weight, scales, x.dtype)
    return x @ (worth if of_output else worth.T)


@_product.register_fake
def _empty_product(x: Tensor, weight: Tensor, scales: Tensor, of_output: bool) -> Tensor:
    """Make a tensor as the product is."""
    return x.new_empty(*x.shape[:-1], weight.shape[1 if of_output else 0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the weight in FP8."""
    ctx.save_for_backward(*inputs[1:3])
    ctx.of_output = inputs[3]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
    """Multiply by the other orientation of the weight, which is frozen."""
    return _product(dout, *ctx.saved_tensors, not ctx.of_output), None, None, None


_product.register_autograd(_backward, setup_context=_keep)


class FrozenFP8Linear(nn.Linear):
    """FP8 linear layer whose inputs are not rounded and have gradients."""

    weight_scale_inv: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N] by the dequantized weight, in the dtype of x."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        out: Tensor = _product(x, self.weight, self.weight_scale_inv.float(), False)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def check_blocks(module: Any) -> None:
    """Raise UnsupportedError unless a module's blocks are those that are dequantized here."""
    if module.block_size is None or tuple(module.block_size) != (BLOCK, BLOCK):
        raise UnsupportedError(
            f"FP8 weights train in blocks of {BLOCK} x {BLOCK}, got {module.block_size}"
        )
