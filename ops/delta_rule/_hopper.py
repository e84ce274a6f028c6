"""Launchers of the rounded form by kernels for Hopper, and where it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torch_hybrid.ops.triton.devices import PROCESSORS, rows_are_aligned, runs_gluon
from torch_hybrid.ops.triton.hopper_attention import rows_by_tiles
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import ROUNDED
from torch_hybrid.ops.triton.segments import Launch

if TYPE_CHECKING:
    from torch_hybrid.ops.delta_rule._triton_scan import Prepared
    from torch_hybrid.ops.delta_rule.op import GatedDeltaRule

CHUNK = 64
HEAD_DIM_K = 128
ROWS_OF_V = 64  # of a group of warps


def serves(prepared: Prepared, q: Tensor, rows: Tensor) -> bool:
    """Tell whether a launch has this form: chunks of 64, heads of 128; TMA finds the ``rows``."""
    num_tokens, _, head_dim = rows.shape
    fits = q.shape[2] == HEAD_DIM_K and head_dim % (2 * ROWS_OF_V) == 0 and num_tokens > 0
    fits &= prepared.num_pieces == ROUNDED.value and prepared.solve.shape[-1] == CHUNK
    return runs_gluon(q.device) and fits and rows_are_aligned(q) and rows_are_aligned(rows)


def hopper_prepare(prepared: Prepared, x: GatedDeltaRule) -> Launch:
    """Launch what fills in blocks of ``prepared``: two value heads of a key share what they can."""
    from torch_hybrid.ops.delta_rule._hopper_prepare import hopper_prepare_kernel

    num_k_heads, num_v_heads = x.k.shape[1], x.beta.shape[1]
    num_heads = 2 if num_v_heads // num_k_heads % 2 == 0 else 1
    box_q, box_k = (rows_by_tiles(rows, HEAD_DIM_K, block_kv=CHUNK) for rows in (x.q, x.k))

    def launch(first_block: int, last_block: int) -> None:
        programs = (last_block - first_block) * num_v_heads // num_heads
        bind(hopper_prepare_kernel, x, prepared)[(programs,)](
            box_q=box_q,
            box_k=box_k,
            first_block=first_block,
            HEADS=num_heads,
            num_warps=4,
            maxnreg=168,  # three programs on a processor: 74 us of 1x8192 instead of 88
            enable_fp_fusion=True,
        )

    return launch


def hopper_walk(
    x: GatedDeltaRule,
    prepared: Prepared,
    carry: Tensor,
    out: Tensor,
    *,
    is_even: bool | None,
) -> Launch:
    """Launch what walks a segment, as ``_triton_scan_kernel.scan`` says.

    Two groups of warps on a processor share what they read where more states than run at once
    are alike: eight sequences of 1024 tokens take 88 us instead of 103, one of 8192 240 instead
    of 153.
    """
    from torch_hybrid.ops.delta_rule._hopper_scan import hopper_scan_kernel

    q, v = x.q, x.v
    _, num_v_heads, head_dim_v = v.shape
    num_programs = head_dim_v // ROWS_OF_V * num_v_heads * x.state_indices.shape[0]
    num_groups = 2 if is_even is not False and num_programs > PROCESSORS else 1

    boxes = {
        "box_q": rows_by_tiles(q, HEAD_DIM_K, block_kv=CHUNK),
        "box_k": rows_by_tiles(prepared.keys[:, 0], HEAD_DIM_K, block_kv=CHUNK),
        "box_v": rows_by_tiles(v, ROWS_OF_V, block_kv=CHUNK),
        "box_solve": rows_by_tiles(prepared.solve[:, :, 0], CHUNK, block_kv=CHUNK),
        "box_attend": rows_by_tiles(prepared.attend[:, :, 0], CHUNK, block_kv=CHUNK),
    }

    def walk(first_block: int, last_block: int) -> None:
        bind(hopper_scan_kernel, x, prepared)[(num_programs // num_groups,)](
            **boxes,
            carry=carry,
            out=out,
            first_block=first_block,
            last_block=last_block,
            GROUPS=num_groups,
            STAGES=3,
            num_warps=4,
            enable_fp_fusion=True,
        )

    return walk
