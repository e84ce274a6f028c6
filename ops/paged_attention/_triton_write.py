"""New keys and values into their pages, and what rows of padding hold."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.paged_attention.op import Pages
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.fp8_kv import narrow
from torch_hybrid.ops.triton.launch import bind


def write_rows(x: Pages, kv: Tensor, out: Tensor, lse: Tensor) -> None:
    """Put the new rows into their pages, and the identity of a merge into padding rows.

    A launch of its own: the kernel that attends reads rows which other programs write here.

    Args:
        x: arguments of the op.
        kv: ``x.kv`` in a dtype that kernels write. **Mutated**.
        out, lse: results, [T, Hq, D] and [T, Hq]. **Mutated**.
    """
    num_tokens, num_kv_heads, head_dim = x.k.shape
    bind(_write_kernel, x)[(num_tokens,)](
        kv=kv,
        out=out,
        lse=lse,
        BLOCK_HQ=triton.next_power_of_2(out.shape[1]),
        BLOCK=min(1024, triton.next_power_of_2(num_kv_heads * head_dim)),
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,
    cu_seqlens: tl.tensor,
    slot_mapping: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    kv_scales: tl.tensor,
    num_seqs: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_kv: tl.tensor,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write the rows of a token. Grid: tokens."""
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(cu_seqlens + num_seqs):
        slot = tl.load(slot_mapping + token).to(tl.int64)
        keys = kv + slot * HKV * D
        values = keys + stride_kv
        for base in range(0, HKV * D, BLOCK):
            index = base + tl.arange(0, BLOCK)
            mask = index < HKV * D
            head = index // D
            p_k = k + token * stride_k_token + head * stride_k_head + index % D
            p_v = v + token * stride_v_token + head * stride_v_head + index % D
            b_k = tl.load(p_k, mask=mask)
            b_v = tl.load(p_v, mask=mask)
            if kv_scales is not None:
                scale_k = tl.load(kv_scales + head, mask=mask, other=1.0)
                scale_v = tl.load(kv_scales + HKV + head, mask=mask, other=1.0)
                b_k = narrow(tl.div_rn(b_k.to(tl.float32), scale_k), kv.dtype.element_ty)
                b_v = narrow(tl.div_rn(b_v.to(tl.float32), scale_v), kv.dtype.element_ty)
            tl.store(keys + index, b_k, mask=mask)
            tl.store(values + index, b_v, mask=mask)
    else:
        for base in range(0, HQ * D, BLOCK):
            index = base + tl.arange(0, BLOCK)
            zeros = tl.zeros_like(index).to(out.dtype.element_ty)
            tl.store(out + token * HQ * D + index, zeros, mask=index < HQ * D)
        head = tl.arange(0, BLOCK_HQ)
        nothing = tl.full([BLOCK_HQ], -float("inf"), dtype=tl.float32)
        tl.store(lse + token * HQ + head, nothing, mask=head < HQ)
