"""Models of checkpoints with ``quant_method: fp8``: layers that keep weights as they are stored.

Adapters and ``cut`` take unread weights of 8 bits as what they are worth. Once it is known what a
model keeps, ``hold_block_fp8`` puts layers in their place that keep numbers and scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.latent_attention import LatentAttention
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.side_by_side import SideBySide
from torch_hybrid.models.checkpoint.block_scales import (
    has_8_bits,
    numbers_and_scales,
    stretches,
)
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.ops.block_scales import BLOCK
from torch_hybrid.ops.fused_experts.op import HAS_GATE
from torch_hybrid.ranks import SummedLinear, SumOverRanks

METHOD = "fp8"


def check_block_fp8(model_type: str, quantization: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless a config's ``quantization_config``, of method "fp8", says that
    weights have blocks of 128 x 128, and that activations are rounded by what they are."""
    for name, value, default in (
        ("weight_block_size", [BLOCK, BLOCK], None),
        ("activation_scheme", "dynamic", None),
        ("fmt", "e4m3", "e4m3"),
    ):
        given = quantization.get(name, default)
        if given != value:
            raise UnsupportedError(
                f"{model_type}: config field quantization_config.{name} must be {value!r}, got "
                f"{given!r}"
            )


def hold_block_fp8(model: nn.Module) -> None:
    """Keep unread weights of 8 bits as they are stored, where their layers multiply such.

    Others are widened as they are read: those of ``kv_b_proj``, which attention over latents takes
    apart.

    Raises:
        UnsupportedError: the layers of a mixture are cut within blocks; or nothing multiplies 8
            bits on the device.
    """
    widened = {id(m.kv_b_proj) for m in model.modules() if isinstance(m, LatentAttention)}
    for module in list(model.modules()):
        if isinstance(module, FusedExperts) and has_8_bits(module.down_proj):
            _hold_experts(module)
        for name, child in list(module.named_children()):
            if id(child) in widened or not isinstance(child, nn.Linear):
                continue
            if has_8_bits(child.weight):
                setattr(module, name, _held(child))


def _hold_experts(experts: FusedExperts) -> None:
    num_parts = 1 + HAS_GATE[experts.activation]
    dtype = experts.down_proj.dtype
    gate_up, gate_up_scales = numbers_and_scales(experts.gate_up_proj, num_parts=num_parts)
    down, down_scales = numbers_and_scales(experts.down_proj)
    experts.hold_scales(
        *(nn.Parameter(weight, requires_grad=False) for weight in (gate_up, down)),
        *(nn.Parameter(scales, requires_grad=False) for scales in (gate_up_scales, down_scales)),
        dtype=dtype,
    )


def _held(linear: nn.Linear) -> nn.Module:
    """A layer that computes what a linear one does, of numbers and scales."""
    weight = linear.weight
    assert isinstance(weight, Unread)
    contents = stretches(weight.content)
    sizes = [content.shape[0] for content in contents]
    biases = [None] * len(sizes) if linear.bias is None else linear.bias.split(sizes)
    parts = [
        _part(Unread(content, weight.dtype, weight.device), bias)
        for content, bias in zip(contents, biases, strict=True)
    ]
    held = parts[0] if len(parts) == 1 else SideBySide(parts)
    return SumOverRanks(held, linear.ranks) if isinstance(linear, SummedLinear) else held


def _part(rows: Unread, bias: Tensor | None) -> nn.Linear | ScaledLinear:
    if has_8_bits(rows):
        numbers, scales = numbers_and_scales(rows)
        return ScaledLinear(numbers, scales, bias, dtype=rows.dtype)
    outputs, inputs = rows.shape
    plain = nn.Linear(inputs, outputs, bias=bias is not None, dtype=rows.dtype, device="meta")
    plain.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain
