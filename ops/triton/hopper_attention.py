"""Launcher of attention's Hopper kernel (``hopper_kernel.py``): where it serves, and with what
tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_hybrid.ops.triton.devices import rows_are_aligned, runs_gluon
from torch_hybrid.ops.triton.launch import bind
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


@dataclass(frozen=True, slots=True)
class _Absent:
    """Arguments of the kernel that some ops have not."""

    cu_seqlens_k: None = None
    seq_lens: None = None
    page_table: None = None


def attend_rows(
    x: Any,
    tiles: HopperTiles,
    k: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kv: Tensor | None = None,
    wanted: Tensor | None = None,
    window: int = 0,
    relative_bias: Tensor | None = None,
    causal: bool = True,
) -> None:
    """Attend to the rows of ``k`` and ``v``, and to what earlier steps left in pages.

    Padding is left alone.

    Args:
        x: arguments of an op: q [T, H, D], v [Tk, HK, V], its scale, and ``cu_seqlens`` [N + 1],
            where sequences begin in q; in k ``cu_seqlens_k`` or, where there are pages, as in q;
            of pages ``seq_lens`` and ``page_table``.
        k: [Tk, HK, D]; T rows of the same sequences if there are pages.
        out, lse: [T, H, V] and float32 [T, H], contiguous, written.
        kv: [2, P, page, HK, D], the pages.
        wanted: [T] int32; a block of tokens none of which has a 1 is left alone.
        window: keys that a query sees, its own included; 0 for all. Causal alone.
        relative_bias: [T, H, R], as ``paged_attention`` takes it. Causal alone.
    """
    from torch_hybrid.ops.triton.hopper_kernel import hopper_attend_kernel  # where there is Gluon

    q, v = x.q, x.v
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v.shape[1:]
    num_seqs = x.cu_seqlens.shape[0] - 1
    block_q = BLOCK_M // (num_heads // num_kv_heads)
    whole = 1 << (head_dim.bit_length() - 1)
    box_k = rows_by_tiles(k, whole, block_kv=tiles.block_kv)
    box_k_rest = box_k
    if head_dim > whole:
        box_k_rest = rows_by_tiles(k, head_dim - whole, block_kv=tiles.block_kv)
    programs = num_blocks(num_tokens, num_seqs, block_q) * num_kv_heads
    bind(hopper_attend_kernel, x, tiles, _Absent())[(programs,)](
        k=k,
        box_k=box_k,
        box_k_rest=box_k_rest,
        box_v=rows_by_tiles(v, v_head_dim, block_kv=tiles.block_kv),
        kv=kv,
        wanted=wanted,
        relative_bias=relative_bias,
        out=out,
        lse=lse,
        scale_log2=log2_scale(x.scale),
        window=window,
        stride_table_page=0 if kv is None else x.page_table.stride(1),
        H=num_heads,
        HK=num_kv_heads,
        HEADS=_heads_at_once(num_kv_heads),
        D=whole,
        REST=head_dim - whole,
        V=v_head_dim,
        PAGE_SIZE=0 if kv is None else kv.shape[2],
        BLOCK_Q=block_q,
        STAGES=tiles.num_stages,
        CAUSAL=causal,
        HAS_WINDOW=window > 0,
        REACH=reach_of(relative_bias),
        num_warps=4,
    )
