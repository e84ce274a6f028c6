"""Layers that keep the weights of a quantized checkpoint as they are stored.

Adapters and ``cut`` see the dequantized shape and dtype of unread weights with scales. Afterwards
``hold_scales`` replaces the layers of such weights by layers that keep numbers and scales.
"""

from __future__ import annotations

from torch import Tensor, nn

from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.read_weights import read_by_weight
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.side_by_side import SideBySide
from torch_hybrid.models.checkpoint.scales import has_scales, numbers_and_scales, stretches
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.ops.fused_experts.op import HAS_GATE
from torch_hybrid.ranks import SummedLinear, SumOverRanks, linear_of


def hold_scales(model: nn.Module) -> None:
    """Replace layers of unread weights with scales by layers that keep them as they are stored.

    Other weights are dequantized as they are read: those of ``kv_b_proj``, which MLA takes apart,
    and integers that are cut within rows that share an int32 word.

    Raises:
        UnsupportedError: weights are cut within blocks or groups; or no op multiplies their format
            on the device.
    """
    widened = read_by_weight(model)
    for module in list(model.modules()):
        if isinstance(module, FusedExperts) and has_scales(module.down_proj):
            _hold_experts(module)
        for name, child in list(module.named_children()):
            # Other modules may read the weight of a subclass (torch's own attention has one).
            if not isinstance(child, nn.Linear) or type(child) not in (nn.Linear, SummedLinear):
                continue
            if child not in widened and has_scales(child.weight):
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
    """Make the layer that computes what a linear one does from its weight as it is stored."""
    weight = linear.weight
    assert isinstance(weight, Unread)
    parts = stretches(weight)
    sizes = [len(rows) for rows, _ in parts]
    biases = [None] * len(sizes) if linear.bias is None else linear.bias.split(sizes)
    layers = [_part(*part, bias) for part, bias in zip(parts, biases, strict=True)]
    held = layers[0] if len(layers) == 1 else SideBySide(layers)
    return SumOverRanks(held, linear.ranks) if isinstance(linear, SummedLinear) else held


def _part(rows: Unread, keeps_scales: bool, bias: Tensor | None) -> nn.Linear | ScaledLinear:
    if keeps_scales:
        numbers, scales = numbers_and_scales(rows)
        return ScaledLinear(numbers, scales, bias, dtype=rows.dtype)
    return linear_of(rows, bias)
