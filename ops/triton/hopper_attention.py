"""Launcher of attention's Hopper kernel (``hopper_kernel.py``): where it serves, and with what
tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from torch_hybrid.ops.triton.devices import rows_are_aligned, runs_gluon
from torch_hybrid.ops.triton.ragged import num_blocks
from torch_hybrid.ops.triton.relative_bias import reach_of
from torch_hybrid.ops.triton.softmax import log2_scale

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M = 128
_HEADS = 8  # at once; 4 and 16 are as fast
# Of a key or query, in parts that are powers of two, and of a value.
HEAD_DIMS = frozenset({(64, 64), (128, 128), (192, 128), (256, 256)})


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperTiles:
    """Tile size, pipeline stages and registers of the Hopper kernel for one problem."""

    block_kv: int
    num_stages: int
    registers: int  # of a thread that computes, of the second group; the first has what is left
    copy_registers: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *pools: Tensor,
        windowed: bool = False,
        biased: bool = False,
    ) -> HopperTiles | None:
        """Choose tiles of which at least two fit in shared memory; None where the kernel does not
        serve.

        With a window or biases (``biased``), tiles have fewer keys: copying warps need more
        registers.
        """
        dims = (q.shape[2], v.shape[2])
        serves = dims in HEAD_DIMS and q.itemsize == 2 and q.shape[1] <= BLOCK_M * k.shape[1]
        serves &= k.shape[0] > 0  # of no rows there is no descriptor
        serves &= not biased or sum(dims) <= 256
        aligned = all(map(rows_are_aligned, (q, k, v, *pools)))
        if not (runs_gluon(q.device) and serves and aligned):
            return None
        if biased:
            return cls(block_kv=64, num_stages=4, registers=192, copy_registers=128)
        if windowed:
            stages = 2 if sum(dims) > 256 else 4
            return cls(block_kv=64, num_stages=stages, registers=208, copy_registers=88)
        block_kv = 64 if sum(dims) > 320 else 128
        return cls(block_kv=block_kv, num_stages=2, registers=224, copy_registers=56)


def _heads_at_once(num_kv_heads: int) -> int:
    """Choose how many key heads have blocks side by side.

    They are few, so that many blocks of one head run at once and share the head's keys in L2.
    """
    return num_kv_heads if num_kv_heads < _HEADS else math.gcd(num_kv_heads, _HEADS)


def rows_by_tiles(rows: Tensor, num_dims: int, *, block_kv: int) -> TensorDescriptor:
    """Describe rows [T, H, D] for TMA, which fetches tiles of ``num_dims`` dims of one head.

    A head begins at the column where it lies in a row of all heads.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from torch_hybrid.ops.triton.hopper import rows_layout

    num_rows, num_heads, head_dim = rows.shape
    stride_row, stride_head, _ = rows.stride()
    num_columns = (num_heads - 1) * stride_head + head_dim
    box = [block_kv, num_dims]
    return TensorDescriptor(rows, [num_rows, num_columns], [stride_row, 1], box, rows_layout())


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    tiles: HopperTiles,
    causal: bool = True,
    cu_seqlens_k: Tensor | None = None,
    pages: tuple[Tensor, Tensor, Tensor] | None = None,
    wanted: Tensor | None = None,
    window: int = 0,
    relative_bias: Tensor | None = None,
) -> None:
    """Attend to the rows of ``k`` and ``v``, and to what earlier steps left in pages.

    Padding is left alone.

    Args:
        q: [T, H, D].
        k, v: [Tk, HK, D] and [Tk, HK, V]; T rows of the same sequences if there are pages.
        cu_seqlens, cu_seqlens_k: [N + 1], where sequences begin in q, and in k without pages.
        out, lse: [T, H, V] and float32 [T, H], contiguous, written.
        pages: (kv [2, P, page, HK, D], seq_lens [N], page_table [N, pages]).
        wanted: [T] int32; a block of tokens none of which has a 1 is left alone.
        window: keys that a query sees, its own included; 0 for all. Causal alone.
        relative_bias: [T, H, R], as ``paged_attention`` takes it. Causal alone.
    """
    from torch_hybrid.ops.triton.hopper_kernel import hopper_attend_kernel  # where there is Gluon

    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v.shape[1:]
    num_seqs = cu_seqlens.shape[0] - 1
    kv, seq_lens, page_table = pages or (None, None, None)
    block_q = BLOCK_M // (num_heads // num_kv_heads)
    whole = 1 << (head_dim.bit_length() - 1)
    box_k = rows_by_tiles(k, whole, block_kv=tiles.block_kv)
    box_k_rest = box_k
    if head_dim > whole:
        box_k_rest = rows_by_tiles(k, head_dim - whole, block_kv=tiles.block_kv)
    hopper_attend_kernel[(num_blocks(num_tokens, num_seqs, block_q) * num_kv_heads,)](
        q,
        k,
        v,
        box_k,
        box_k_rest,
        rows_by_tiles(v, v_head_dim, block_kv=tiles.block_kv),
        kv,
        cu_seqlens,
        cu_seqlens_k,
        seq_lens,
        page_table,
        wanted,
        relative_bias,
        out,
        lse,
        log2_scale(scale),
        window,
        num_seqs,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0 if kv is None else kv.stride(0),
        0 if page_table is None else page_table.stride(0),
        0 if page_table is None else page_table.stride(1),
        H=num_heads,
        HK=num_kv_heads,
        HEADS=_heads_at_once(num_kv_heads),
        D=whole,
        REST=head_dim - whole,
        V=v_head_dim,
        PAGE_SIZE=0 if kv is None else kv.shape[2],
        BLOCK_Q=block_q,
        BLOCK_KV=tiles.block_kv,
        STAGES=tiles.num_stages,
        CAUSAL=causal,
        HAS_WINDOW=window > 0,
        REACH=reach_of(relative_bias),
        REGISTERS=tiles.registers,
        COPY_REGISTERS=tiles.copy_registers,
        num_warps=4,
    )
