"""The products of many pairs on Hopper, by kernels in Gluon."""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_hybrid.ops.formats.block_scales import BLOCK
from torch_hybrid.ops.fused_experts._triton_group import cut_blocks
from torch_hybrid.ops.triton.devices import PROCESSORS, runs_gluon
from torch_hybrid.ops.triton.fp8 import rounded_rows

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_LEAST_PAIRS = 16  # of an expert on average: with fewer, the other kernels take the same
_LEAST_FP8_PAIRS = 16


def suits(x: Tensor, gate_up: Tensor, down: Tensor, num_pairs: int) -> bool:
    """Whether :func:`hopper_products` takes these; by what a captured graph keeps."""
    num_experts, dim, width = down.shape
    return (
        x.itemsize == 2
        and num_pairs > _LEAST_PAIRS * num_experts
        and runs_gluon(x.device)
        # Stages of 64 columns, copies of 16 bytes, places in x of 32 bits.
        and dim % 64 == 0
        and width % 64 == 0
        and x.stride(0) % 16 == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, gate_up, down))
        and x.shape[0] * x.stride(0) < 2**31
    )


def hopper_products(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    results: Tensor,
    *,
    top_k: int,
    activation: str,
    limit: None,
    softcaps: None,
) -> None:
    """Fill ``results`` [P, D] with what the experts give for each pair, unweighted."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from torch_hybrid.ops.fused_experts import _hopper_kernels as kernels

    num_experts, dim, width = down.shape
    num_pairs = results.shape[0]
    blocks = cut_blocks(starts, num_pairs, kernels.NUM_GROUPS * kernels.GROUP_ROWS)
    hidden = x.new_empty(num_pairs, width)
    sizes = {"E": num_experts, "D": dim, "I": width}
    kernels._hopper_gate_up_kernel[(PROCESSORS,)](
        x,
        order,
        blocks,
        _weights(gate_up, kernels),
        hidden,
        blocks.shape[0],
        x.stride(0),
        ACTIVATION=activation,
        TOP_K=top_k,
        **sizes,
        num_warps=4,
    )
    box = [kernels.GROUP_ROWS, kernels.DEPTH]
    kernels._hopper_down_kernel[(PROCESSORS,)](
        TensorDescriptor.from_tensor(hidden, box, kernels.rows_layout()),
        order,
        blocks,
        _weights(down, kernels),
        results,
        blocks.shape[0],
        **sizes,
        num_warps=4,
    )


def suits_fp8(x: Tensor, gate_up: Tensor, down: Tensor, num_pairs: int) -> bool:
    """Whether :func:`fp8_hopper_products` takes these; by what a captured graph keeps."""
    num_experts, dim, width = down.shape
    return (
        num_pairs > _LEAST_FP8_PAIRS * num_experts
        and runs_gluon(x.device)
        # Whole blocks of one scale, copies of 16 bytes, places in x of 32 bits.
        and dim % BLOCK == 0
        and width % BLOCK == 0
        and x.itemsize == 2
        and all(tensor.data_ptr() % 16 == 0 for tensor in (gate_up, down))
        and x.numel() < 2**31
    )


def fp8_hopper_products(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    results: Tensor,
    *,
    gate_up_scales: Tensor,
    down_scales: Tensor,
    top_k: int,
    activation: str,
    limit: None,
    softcaps: None,
) -> None:
    """The same of weights of 8 bits; tokens and hidden activations are rounded to such."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from torch_hybrid.ops.fused_experts import _hopper_fp8_kernels as kernels

    num_experts, dim, width = down.shape
    num_pairs = results.shape[0]
    blocks = cut_blocks(starts, num_pairs, kernels.NUM_GROUPS * kernels.GROUP_ROWS)
    numbers, units = rounded_rows(x)
    hidden = x.new_empty(num_pairs, width)
    sizes = {"E": num_experts, "D": dim, "I": width}
    kernels._hopper_fp8_gate_up_kernel[(PROCESSORS,)](
        numbers,
        units,
        order,
        blocks,
        _weights(gate_up, kernels),
        gate_up_scales,
        hidden,
        blocks.shape[0],
        x.shape[0],
        ACTIVATION=activation,
        TOP_K=top_k,
        **sizes,
        num_warps=4,
    )
    numbers, units = rounded_rows(hidden)
    box = [kernels.GROUP_ROWS, kernels.DEPTH]
    kernel, options = kernels._hopper_fp8_down_kernel, dict[str, Any]()
    stages = kernels.held_stages(width)
    if stages > 0:
        kernel = kernels._hopper_fp8_down_held_kernel
        tiles = math.gcd(kernels.HELD_TILES, dim // kernels.DEPTH)
        options = {"TILES": tiles, "STAGES": stages}
    kernel[(PROCESSORS,)](
        TensorDescriptor.from_tensor(numbers, box, kernels.rows_layout()),
        units,
        order,
        blocks,
        _weights(down, kernels),
        down_scales,
        results,
        blocks.shape[0],
        num_pairs,
        **sizes,
        **options,
        num_warps=4,
    )


def _weights(weights: Tensor, kernels: ModuleType) -> TensorDescriptor:
    """Of [E, R, C], half of a tile's rows and a stage's columns, in the order of the kernels."""
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
