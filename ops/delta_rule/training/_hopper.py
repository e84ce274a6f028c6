"""Launchers of the gated rule's backward by kernels for Hopper, and where it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.ops.delta_rule._hopper import CHUNK, HEAD_DIM_K, ROWS_OF_V
from torch_hybrid.ops.delta_rule.training._triton_unit_rows import UnitRows
from torch_hybrid.ops.delta_rule.training._triton_walks import Rows, Walked
from torch_hybrid.ops.delta_rule.training.op import TrainedGatedDeltaRule
from torch_hybrid.ops.triton.devices import PROCESSORS, rows_are_aligned, runs_gluon
from torch_hybrid.ops.triton.hopper_attention import rows_by_tiles
from torch_hybrid.ops.triton.launch import bind

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def serves(x: TrainedGatedDeltaRule, q: Tensor, k: Tensor) -> bool:
    """Tell whether a launch has this form: heads of 128 in bfloat16; TMA finds the rows."""
    fits = q.dtype == torch.bfloat16 and q.shape[2] == x.v.shape[2] == HEAD_DIM_K
    return fits and runs_gluon(q.device) and all(map(rows_are_aligned, (q, k, x.v, x.dout)))


def hopper_walks(
    x: TrainedGatedDeltaRule, rows: Rows, walked: Walked, grads: tuple[Tensor, ...]
) -> None:
    """Fill in states, errors and their gradients, as both walks of ``_triton_walks.py`` do."""
    from torch_hybrid.ops.delta_rule.training._hopper_walks import (
        hopper_gradients_kernel,
        hopper_states_kernel,
    )

    programs = x.beta.shape[1] * x.num_seqs * HEAD_DIM_K // ROWS_OF_V
    groups = 2 if programs > PROCESSORS else 1
    grid = (programs // groups,)

    def tiles(rows: Tensor, num_dims: int) -> TensorDescriptor:
        return rows_by_tiles(rows, num_dims, block_kv=CHUNK)

    keys, solve = tiles(rows.reads, HEAD_DIM_K), tiles(rows.solve, CHUNK)
    bind(hopper_states_kernel, x, rows, walked)[grid](
        box_k=keys,
        box_v=tiles(x.v, ROWS_OF_V),
        box_solve=solve,
        box_states=_matrices(walked.states, ROWS_OF_V),
        box_errors=tiles(walked.errors, ROWS_OF_V),
        GROUPS=groups,
        STAGES=3,
        num_warps=4,
        enable_fp_fusion=True,
    )
    dq, dk, dv, dg, dbeta, dinitial = grads
    bind(hopper_gradients_kernel, x, rows, walked)[grid](
        box_q=tiles(rows.queries, HEAD_DIM_K),
        box_k=keys,
        box_do=tiles(x.dout, ROWS_OF_V),
        box_solve=solve,
        box_attend=tiles(rows.attend, CHUNK),
        box_dstates=_matrices(walked.dstates, ROWS_OF_V),
        box_derrors=tiles(walked.derrors, ROWS_OF_V),
        box_dv=tiles(dv, ROWS_OF_V),
        dinitial=dinitial if x.initial_state is not None else None,
        dq=dq,
        dk=dk,
        dv=dv,
        dg=dg,
        dbeta=dbeta,
        GROUPS=groups,
        STAGES=2 if groups == 2 else 3,
        num_warps=4,
        enable_fp_fusion=True,
        launch_pdl=True,
    )


def hopper_inputs(
    x: TrainedGatedDeltaRule,
    unit: UnitRows,
    rows: Rows,
    walked: Walked,
    places: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill in the gradients of q, k, g and beta, those of q and k before they were ``unit``."""
    from torch_hybrid.ops.delta_rule.training._hopper_inputs import hopper_inputs_kernel

    num_k_heads, num_v_heads = rows.queries.shape[1], x.beta.shape[1]
    tiles = (rows.queries, rows.reads, x.dout, walked.errors, walked.derrors)
    hopper_inputs_kernel[(min(PROCESSORS, places.shape[0] * num_k_heads),)](
        *(rows_by_tiles(each, HEAD_DIM_K, block_kv=CHUNK) for each in tiles),
        *(_matrices(states, HEAD_DIM_K) for states in (walked.states, walked.dstates)),
        rows.decays,
        x.beta,
        places,
        *grads,
        unit.factors_q,
        unit.factors_k,
        x.scale,
        places.shape[0],
        x.v.shape[0],
        x.beta.stride(0),
        H=num_k_heads,
        HV=num_v_heads,
        num_warps=8,
        enable_fp_fusion=True,
    )


def _matrices(states: Tensor, num_rows: int) -> TensorDescriptor:
    """Describe states [X, HV, V, K] for TMA, which moves so many rows; row -1 has zeros."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from torch_hybrid.ops.triton.hopper import rows_layout

    rows = states.view(-1, HEAD_DIM_K)
    return TensorDescriptor.from_tensor(rows, [num_rows, HEAD_DIM_K], rows_layout())
