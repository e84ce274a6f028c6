"""Launcher of the gated rule's gradients of inputs by a kernel for Hopper, and where it has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.ops.delta_rule._hopper import CHUNK, HEAD_DIM_K
from torch_hybrid.ops.delta_rule.training._triton_walks import Rows, Walked
from torch_hybrid.ops.delta_rule.training.op import GatedDeltaRuleBackward
from torch_hybrid.ops.triton.devices import PROCESSORS, rows_are_aligned, runs_gluon
from torch_hybrid.ops.triton.hopper_attention import rows_by_tiles

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def serves(x: GatedDeltaRuleBackward, q: Tensor, k: Tensor) -> bool:
    """Tell whether a launch has this form: heads of 128 in bfloat16; TMA finds the rows."""
    fits = q.dtype == torch.bfloat16 and q.shape[2] == x.v.shape[2] == HEAD_DIM_K
    return fits and runs_gluon(q.device) and all(map(rows_are_aligned, (q, k, x.dout)))


def hopper_inputs(
    x: GatedDeltaRuleBackward,
    rows: Rows,
    walked: Walked,
    places: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill in the gradients of q, k, g and beta."""
    from torch_hybrid.ops.delta_rule.training._hopper_inputs import hopper_inputs_kernel

    num_k_heads, num_v_heads = rows.queries.shape[1], x.beta.shape[1]
    tiles = (rows.queries, rows.reads, x.dout, walked.errors, walked.derrors)
    hopper_inputs_kernel[(min(PROCESSORS, places.shape[0] * num_k_heads),)](
        *(rows_by_tiles(each, HEAD_DIM_K, block_kv=CHUNK) for each in tiles),
        *map(_matrices, (walked.states, walked.dstates)),
        rows.decays,
        x.beta,
        places,
        *grads,
        x.scale,
        places.shape[0],
        x.v.shape[0],
        x.beta.stride(0),
        H=num_k_heads,
        HV=num_v_heads,
        num_warps=8,
        enable_fp_fusion=True,
    )


def _matrices(states: Tensor) -> TensorDescriptor:
    """Describe states [X, HV, V, K] for TMA, which fetches one at once, or zeros for row -1."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from torch_hybrid.ops.triton.hopper import rows_layout

    rows = states.view(-1, HEAD_DIM_K)
    return TensorDescriptor.from_tensor(rows, [HEAD_DIM_K, HEAD_DIM_K], rows_layout())
