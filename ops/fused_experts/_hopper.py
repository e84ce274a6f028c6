"""The products of many pairs on Hopper, by kernels in Gluon."""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_hybrid.ops.formats.block_scales import BLOCK
from torch_hybrid.ops.fused_experts._triton_activation import sizes
from torch_hybrid.ops.fused_experts._triton_group import cut_blocks
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.triton.devices import PROCESSORS, runs_gluon
from torch_hybrid.ops.triton.fp8 import rounded_rows
from torch_hybrid.ops.triton.launch import bind

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_LEAST_PAIRS = 16  # of an expert on average: with fewer, the other kernels take the same
_LEAST_FP8_PAIRS = 16


def suits(x: FusedExperts) -> bool:
    """Tell whether :func:`hopper_products` takes a call, by what a captured graph keeps."""
    stride = x.x.stride(0)
    return (
        x.limit is None
        and x.softcaps is None
        and x.x.itemsize == 2
        and x.num_pairs > _LEAST_PAIRS * x.num_experts
        and runs_gluon(x.x.device)
        # Stages of 64 columns, copies of 16 bytes, places in x of 32 bits.
        and x.dim % 64 == 0
        and x.width % 64 == 0
        and stride % 16 == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x.x, x.gate_up, x.down))
        and len(x.x) * stride < 2**31
    )


def hopper_products(x: FusedExperts, order: Tensor, starts: Tensor, results: Tensor) -> None:
    """Fill ``results`` [P, D] with each pair's output of its expert, unweighted."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from torch_hybrid.ops.fused_experts import _hopper_kernels as kernels
    from torch_hybrid.ops.fused_experts import _hopper_tiles as tiles

    blocks = cut_blocks(starts, x.num_pairs, tiles.NUM_GROUPS * tiles.GROUP_ROWS)
    hidden = x.x.new_empty(x.num_pairs, x.width)
    bind(kernels._hopper_gate_up_kernel, x)[(PROCESSORS,)](
        order=order,
        blocks=blocks,
        gate_up=_weights(x.gate_up, kernels),
        hidden=hidden,
        num_blocks=blocks.shape[0],
        **sizes(x),
        num_warps=4,
    )
    box = [tiles.GROUP_ROWS, kernels.DEPTH]
    kernels._hopper_down_kernel[(PROCESSORS,)](
        TensorDescriptor.from_tensor(hidden, box, kernels.rows_layout()),
        order,
        blocks,
        _weights(x.down, kernels),
        results,
        blocks.shape[0],
        **sizes(x),
        num_warps=4,
    )


def suits_fp8(x: FusedExperts) -> bool:
    """Tell whether :func:`fp8_hopper_products` takes a call, by what a captured graph keeps."""
    return (
        x.limit is None
        and x.softcaps is None
        and x.num_pairs > _LEAST_FP8_PAIRS * x.num_experts
        and runs_gluon(x.x.device)
        # Whole blocks of one scale, copies of 16 bytes, places in x of 32 bits.
        and x.dim % BLOCK == 0
        and x.width % BLOCK == 0
        and x.x.itemsize == 2
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x.gate_up, x.down))
        and x.x.numel() < 2**31
    )


def fp8_hopper_products(x: FusedExperts, order: Tensor, starts: Tensor, results: Tensor) -> None:
    """Fill ``results`` with FP8 products: tokens and hidden activations are rounded to FP8."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from torch_hybrid.ops.fused_experts import _hopper_fp8_kernels as kernels
    from torch_hybrid.ops.fused_experts import _hopper_tiles as tiles

    blocks = cut_blocks(starts, x.num_pairs, tiles.NUM_GROUPS * tiles.GROUP_ROWS)
    numbers, units = rounded_rows(x.x)
    hidden = x.x.new_empty(x.num_pairs, x.width)
    bind(kernels._hopper_fp8_gate_up_kernel, x)[(PROCESSORS,)](
        x=numbers,
        units=units,
        order=order,
        blocks=blocks,
        gate_up=_weights(x.gate_up, kernels),
        scales=x.gate_up_scales,
        hidden=hidden,
        num_blocks=blocks.shape[0],
        **sizes(x),
        num_warps=4,
    )
    numbers, units = rounded_rows(hidden)
    box = [tiles.GROUP_ROWS, kernels.DEPTH]
    kernel, options = kernels._hopper_fp8_down_kernel, dict[str, Any]()
    stages = kernels.held_stages(x.width)
    if stages > 0:
        kernel = kernels._hopper_fp8_down_held_kernel
        num_tiles = math.gcd(kernels.HELD_TILES, x.dim // kernels.DEPTH)
        options = {"TILES": num_tiles, "STAGES": stages}
    kernel[(PROCESSORS,)](
        TensorDescriptor.from_tensor(numbers, box, kernels.rows_layout()),
        units,
        order,
        blocks,
        _weights(x.down, kernels),
        x.down_scales,
        results,
        blocks.shape[0],
        x.num_pairs,
        **sizes(x),
        **options,
        num_warps=4,
    )


def _weights(weights: Tensor, kernels: ModuleType) -> TensorDescriptor:
    """Describe copies of [E, R, C]: half a tile's rows, in the kernels' order, of a stage."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_experts, num_rows, depth = weights.shape
    # Row 32 n + 8 q + 2 i + b, as n, i, q, b.
    return TensorDescriptor(
        weights,
        [num_experts * num_rows // 32, 4, 4, 2, depth],
        [32 * depth, 2 * depth, 8 * depth, depth, 1],
        [kernels.HALF // 32, 4, 4, 2, kernels.DEPTH],
        kernels.weights_layout(),
    )
