# mypy: disable-error-code="untyped-decorator"
"""The experts in Triton for few tokens: no grouping, since few pairs share an expert.

Each weight is multiplied as it comes from memory; where two tokens have an expert in common, its
weights come from the L2 cache the second time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts._triton_activation import activate, activated, sizes
from torch_hybrid.ops.fused_experts.op import FusedExperts

_BLOCK_N = 8  # rows of weights that a program reads side by side
_BLOCK_K = 256
_NUM_STAGES = 4
_NUM_WARPS = 4


def few_tokens(x: FusedExperts) -> Tensor:
    """Launch a kernel for the hidden activations of all pairs, and one for tokens' outputs."""
    out = x.x.new_empty(x.x.shape)
    hidden = x.x.new_empty(x.num_pairs, x.width)
    constants = {
        "TOP_K": x.top_k,
        **sizes(x),
        "BLOCK_N": _BLOCK_N,
        "STAGES": _NUM_STAGES,
        "num_warps": _NUM_WARPS,
        "enable_fp_fusion": True,
    }
    _hidden_kernel[(x.num_pairs, triton.cdiv(x.width, _BLOCK_N))](
        x.x,
        x.expert_ids,
        x.gate_up,
        hidden,
        x.x.stride(0),
        **activated(x),
        BLOCK_K=min(_BLOCK_K, triton.next_power_of_2(x.dim)),
        **constants,
    )
    _out_kernel[(len(out), triton.cdiv(x.dim, _BLOCK_N))](
        hidden,
        x.expert_ids,
        x.expert_weights,
        x.down,
        out,
        BLOCK_K=min(_BLOCK_K, triton.next_power_of_2(x.width)),
        **constants,
    )
    return out


@triton.jit
def _hidden_kernel(
    x: tl.tensor,
    expert_ids: tl.tensor,
    gate_up: tl.tensor,
    hidden: tl.tensor,
    stride_x: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N hidden activations of one pair of a token and an expert, outside the tensor
    cores.

    Grid: (pairs, I / BLOCK_N). Tile: BLOCK_N rows of weights by BLOCK_K columns. Pipeline: STAGES
    tiles of weights. Registers: a partial sum for each element of a tile, for gate and for up.
    """
    pair = tl.program_id(0)
    expert = tl.load(expert_ids + pair).to(tl.int64)
    if expert == E:
        return
    index_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    index_k = tl.arange(0, BLOCK_K)
    mask_n = (index_n < I)[:, None]
    p_x = x + (pair // TOP_K).to(tl.int64) * stride_x + index_k
    p_w = gate_up + expert * ((1 + HAS_GATE) * I * D) + index_n[:, None] * D + index_k[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for first in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        mask_k = first + index_k < D
        mask_w = mask_n & mask_k[None, :]
        b_x = tl.load(p_x + first, mask=mask_k, other=0.0).to(tl.float32)[None, :]
        if HAS_GATE:
            gate += tl.load(p_w + first, mask=mask_w, other=0.0).to(tl.float32) * b_x
        up += tl.load(p_w + HAS_GATE * I * D + first, mask=mask_w, other=0.0).to(tl.float32) * b_x
    b_hidden = activate(tl.sum(gate, 1), tl.sum(up, 1), HAS_GATE, LIMIT, SOFTCAPS)
    p_hidden = hidden + pair.to(tl.int64) * I + index_n
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=index_n < I)


@triton.jit
def _out_kernel(
    hidden: tl.tensor,
    expert_ids: tl.tensor,
    expert_weights: tl.tensor,
    down: tl.tensor,
    out: tl.tensor,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of one token, the weighted sum over its experts, outside the tensor
    cores.

    Grid: (tokens, D / BLOCK_N). Tile: BLOCK_N rows of weights by BLOCK_K columns; the loop runs
    over all experts' columns. Pipeline: STAGES tiles. Registers: a partial sum for each element of
    a tile.
    """
    CHUNKS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0)
    index_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    index_k = tl.arange(0, BLOCK_K)
    mask_n = (index_n < D)[:, None]
    p_w = down + index_n[:, None] * I + index_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for step in tl.range(0, TOP_K * CHUNKS, num_stages=STAGES):
        pair = token * TOP_K + step // CHUNKS
        first = step % CHUNKS * BLOCK_K
        expert = tl.load(expert_ids + pair).to(tl.int64)
        mask_k = (first + index_k < I) & (expert < E)
        weight = tl.where(expert < E, tl.load(expert_weights + pair).to(tl.float32), 0.0)
        b_h = tl.load(hidden + pair * I + first + index_k, mask=mask_k, other=0.0)
        b_w = tl.load(p_w + expert * (D * I) + first, mask=mask_n & mask_k[None, :], other=0.0)
        acc += b_w.to(tl.float32) * (b_h.to(tl.float32) * weight)[None, :]
    b_out = tl.sum(acc, 1)
    p_out = out + token.to(tl.int64) * D + index_n
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=index_n < D)
