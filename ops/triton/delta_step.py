# mypy: disable-error-code="untyped-decorator"
"""What the Triton kernels of delta rules' steps share, those that verify drafts too: how they are
launched, and how a program holds the state of a head.

It comes in pieces of a few columns, so that a thread has few rows of each and adds up most of K by
itself: with P pieces, element e of what is read along K (q, k) is of piece ``e % P``.

A state is to have the same bits whichever kernel advanced it. So all go through the same functions,
and nothing is fused but what is written as ``fma``: a compiler chooses by what stands beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_step import StepTensors

# Columns of a piece, which stand side by side in a warp.
PIECE_COLUMNS = 32
# State elements that one warp keeps in registers: 128 a thread.
_STATE_TILE = 4096


def launch_step(
    kernel: Any,
    *tensors: Tensor | None,
    numbers: tuple[float | None, ...],
    activation: str,
    constants: Mapping[str, int] = MappingProxyType({}),
) -> Tensor:
    """Launch a program for each key head of a sequence.

    Args:
        kernel: takes the tensors of the op in their order, the output, ``numbers``, the counts of
            tokens and of sequences, strides from token to token, and the constants named below.
        tensors, activation: as of the op.
        numbers: options of the op that the kernel reads.
        constants: others that it is compiled for.
    """
    x = StepTensors(*tensors[: len(fields(StepTensors))])  # type: ignore[arg-type]
    _, num_v_heads, head_dim_v, head_dim_k = x.state.shape
    num_k_heads = x.widths[0] // head_dim_k
    num_seqs = x.state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(x.z, memory_format=torch.contiguous_format)
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    block_k = max(PIECE_COLUMNS, triton.next_power_of_2(head_dim_k))
    block_v = triton.next_power_of_2(head_dim_v)
    kernel[(num_seqs * num_k_heads,)](
        *tensors,
        out,
        *numbers,
        x.qkv.shape[0],
        num_seqs,
        x.qkv.stride(0),
        x.z.stride(0),
        x.b.stride(0),
        x.a.stride(0),
        H=num_k_heads,
        HV=num_v_heads,
        K=head_dim_k,
        V=head_dim_v,
        W=x.conv_weight.shape[1],
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        HALVINGS=(block_k // PIECE_COLUMNS).bit_length() - 1,
        SILU=activation == "silu",
        **constants,
        num_warps=max(1, block_k * block_v // _STATE_TILE),
        enable_fp_fusion=False,
    )
    return out


def launch_verify(
    kernel: Any,
    *tensors: Tensor | None,
    numbers: tuple[float | None, ...],
    activation: str,
    constants: Mapping[str, int] = MappingProxyType({}),
) -> Tensor:
    """As ``launch_step``, for a kernel that takes records and their counts after the step's
    tensors, and is told how many records a slot has."""
    *_, records, _accepted = tensors
    assert records is not None
    constants = {**constants, "DRAFTS": records.shape[1]}
    return launch_step(
        kernel, *tensors, numbers=numbers, activation=activation, constants=constants
    )


@triton.jit
def load_state(
    p_state: tl.tensor,
    mask_v: tl.tensor,
    K: tl.constexpr,
    LANES: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> tl.tuple:
    """The pieces of a head's state, the first from ``p_state`` on; zeros where masked."""
    lane = tl.arange(0, LANES)
    pieces = ()
    for piece in tl.static_range(1 << HALVINGS):
        mask = mask_v[:, None] & (piece * LANES + lane < K)[None, :]
        b_s = tl.load(p_state + piece * LANES, mask=mask, other=0.0)
        pieces = pieces + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def leave_state(
    p_state: tl.tensor,
    pieces: tl.tuple,
    mask_v: tl.tensor,
    K: tl.constexpr,
    LANES: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> None:
    """Store the pieces of a head's state."""
    lane = tl.arange(0, LANES)
    for piece in tl.static_range(1 << HALVINGS):
        mask = mask_v[:, None] & (piece * LANES + lane < K)[None, :]
        tl.store(p_state + piece * LANES, pieces[piece], mask=mask)


@triton.jit
def read_state(pieces: tl.tuple, parts: tl.tuple, HALVINGS: tl.constexpr) -> tl.tensor:
    """``S x`` of a head's state and a vector, both in pieces."""
    read = tl.zeros_like(pieces[0])
    for piece in tl.static_range(1 << HALVINGS):
        read = tl.fma(pieces[piece], parts[piece][None, :], read)
    return tl.sum(read, 1)


@triton.jit
def unit(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """x / |x|, scaled."""
    return x * (tl.rsqrt(tl.sum(x * x, 0) + 1e-6) * scale)


@triton.jit
def cut_in_pieces(x: tl.tensor, HALVINGS: tl.constexpr) -> tl.tuple:
    """P = 2^HALVINGS vectors of every P-th element of x, the first one from element 0 on."""
    pieces = (x,)
    for level in tl.static_range(HALVINGS):
        even = ()
        odd = ()
        for i in tl.static_range(1 << level):
            b_x = pieces[i]
            b_even, b_odd = tl.split(tl.reshape(b_x, [b_x.shape[0] // 2, 2]))
            even = even + (b_even,)  # type: ignore[assignment]  # noqa: RUF005
            odd = odd + (b_odd,)  # type: ignore[assignment]  # noqa: RUF005
        pieces = even + odd  # type: ignore[assignment]
    return pieces
