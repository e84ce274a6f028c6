# mypy: disable-error-code="untyped-decorator"
"""Implementation "flashinfer" of the recurrent form: FlashInfer's selective state update.

FlashInfer takes one step size for the decay and for what is added, ``S = e^(A step) S + step x
B^T``, where ours are two. With ``A = -1`` a decay is a step size; values are scaled by what is left
of their weight, in float32 like all else, so that nothing is rounded twice. A decay next to none
takes the least step at which it rounds to 1. The weight of a token in its own output is added
afterwards, to values as they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.flashinfer.one_token import IN_PLACE
from torch_hybrid.ops.flashinfer.states import packed_states, store_states

_BLOCK = 1024  # elements of a row that a program takes


def recurrent_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    planned: Sequence[Tensor],
) -> Tensor:
    """Launcher of ``torch_hybrid::recurrent_ssd``."""
    from flashinfer.mamba import selective_state_update

    slots, place = planned
    v_dim, k_dim = state.shape[2:]
    if state_indices.shape[0] == 0:
        return v.new_empty(v.shape)
    rows = _Rows.of(q, k, v, g, dt, scale=scale)
    is_in_place = place.item() == IN_PLACE  # a tensor on the host
    pool = state if is_in_place else packed_states(state, cu_seqlens, initial_indices)
    exact = torch.empty_like(rows.x)
    selective_state_update(
        pool,
        rows.x,
        rows.step.unsqueeze(-1).expand(-1, -1, v_dim),
        rows.rate[:, None, None].expand(-1, v_dim, k_dim),
        rows.B,
        rows.C,
        rows.skip[:, None].expand(-1, v_dim),
        state_batch_indices=slots,
        dst_state_batch_indices=state_indices if is_in_place else None,
        pad_slot_id=-1,
        out=exact,
        backend="flashinfer",
    )
    if not is_in_place:
        store_states(pool, state, cu_seqlens, state_indices)
    return _outputs(exact, v, D, cu_seqlens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The operands as FlashInfer takes them, in float32: dense, one row for each sequence."""

    x: Tensor  # [N, H, V]
    B: Tensor  # [N, G, K]
    C: Tensor  # [N, G, K]
    step: Tensor  # [N, H]
    rate: Tensor  # [H] -1
    skip: Tensor  # [H] 0

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor | None, *, scale: float
    ) -> _Rows:
        num_seqs, num_heads, v_dim = v.shape
        num_groups, k_dim = k.shape[1:]
        # Each in memory of its own: FlashInfer wants x, B and C at multiples of 128 bytes.
        x, B, C = (y.new_empty(y.shape, dtype=torch.float32) for y in (v, k, q))
        step = g.new_empty(num_seqs + 2, num_heads)
        x_size, k_size = num_heads * v_dim, num_groups * k_dim
        num_blocks = triton.cdiv(x_size, _BLOCK) + 2 * triton.cdiv(k_size, _BLOCK) + 1
        _rows_kernel[(num_seqs, num_blocks)](
            q,
            k,
            v,
            g,
            dt,
            x,
            B,
            C,
            step,
            scale,
            num_seqs,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            g.stride(0),
            0 if dt is None else dt.stride(0),
            X_SIZE=x_size,
            K_SIZE=k_size,
            H=num_heads,
            V=v_dim,
            BLOCK_H=triton.next_power_of_2(num_heads),
            BLOCK=_BLOCK,
        )
        return cls(x=x, B=B, C=C, step=step[:-2], rate=step[-2], skip=step[-1])


def _outputs(exact: Tensor, v: Tensor, D: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """What FlashInfer read from the states, with what a token adds to its own output."""
    num_seqs, num_heads, v_dim = v.shape
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    _outputs_kernel[(num_seqs, triton.cdiv(num_heads * v_dim, _BLOCK))](
        exact,
        v,
        D,
        cu_seqlens,
        out,
        num_seqs,
        v.stride(0),
        SIZE=num_heads * v_dim,
        V=v_dim,
        BLOCK=_BLOCK,
    )
    return out


@triton.jit
def _step_of(g: tl.tensor) -> tl.tensor:
    """The step size of a decay at a rate of -1: one that rounds to 1 takes the least, one that
    rounds to 0 a large one."""
    return tl.minimum(tl.maximum(-g, 2.0**-30), 1000.0)


@triton.jit(do_not_specialize=["num_seqs"])
def _rows_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    dt: tl.tensor | None,
    x: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    step: tl.tensor,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_dt: tl.tensor,
    X_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: a part of the values, keys or queries of one sequence, or its step sizes."""
    X_BLOCKS: tl.constexpr = (X_SIZE + BLOCK - 1) // BLOCK
    K_BLOCKS: tl.constexpr = (K_SIZE + BLOCK - 1) // BLOCK
    seq = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < X_BLOCKS:
        index = block * BLOCK + tl.arange(0, BLOCK)
        inside = index < X_SIZE
        head = index // V
        b_x = tl.load(v + seq * stride_v + index, mask=inside, other=0.0).to(tl.float32)
        if dt is not None:
            b_x *= tl.load(dt + seq * stride_dt + head, mask=inside, other=0.0)
        b_x /= _step_of(tl.load(g + seq * stride_g + head, mask=inside, other=0.0))
        tl.store(x + seq * X_SIZE + index, b_x, mask=inside)
    elif block < X_BLOCKS + K_BLOCKS:
        index = (block - X_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        inside = index < K_SIZE
        b_k = tl.load(k + seq * stride_k + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(B + seq * K_SIZE + index, b_k, mask=inside)
    elif block < X_BLOCKS + 2 * K_BLOCKS:
        index = (block - X_BLOCKS - K_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        inside = index < K_SIZE
        b_q = tl.load(q + seq * stride_q + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(C + seq * K_SIZE + index, b_q * scale, mask=inside)
    else:
        head = tl.arange(0, BLOCK_H)
        is_head = head < H
        b_step = _step_of(tl.load(g + seq * stride_g + head, mask=is_head, other=0.0))
        tl.store(step + seq * H + head, b_step, mask=is_head)
        if seq == 0:
            rates = step + tl.cast(num_seqs, tl.int64) * H + head
            tl.store(rates, tl.full([BLOCK_H], -1.0, tl.float32), mask=is_head)
            tl.store(rates + H, tl.zeros([BLOCK_H], tl.float32), mask=is_head)


@triton.jit(do_not_specialize=["num_seqs"])
def _outputs_kernel(
    exact: tl.tensor,
    v: tl.tensor,
    D: tl.tensor | None,
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    num_seqs: tl.tensor,
    stride_v: tl.tensor,
    SIZE: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: a part of one token's outputs; those of padding are 0."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < SIZE
    has_token = inside & (token < tl.load(cu_seqlens + num_seqs))
    b_o = tl.load(exact + token * SIZE + index, mask=has_token, other=0.0)
    if D is not None:
        b_v = tl.load(v + token * stride_v + index, mask=has_token, other=0.0).to(tl.float32)
        b_o += tl.load(D + index // V, mask=inside, other=0.0) * b_v
    tl.store(out + token * SIZE + index, b_o.to(out.dtype.element_ty), mask=inside)
