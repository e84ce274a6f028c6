"""Implementation "flashinfer": FlashInfer's fa3 for new tokens and what they follow, on Hopper.

What is planned is the causal call of a step, which takes its time. Chunks of a prefix are other
calls, of other lengths: they are for implementation "triton", which is called for them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths, Planned
from torch_hybrid.ops.flashinfer.prefill import COMMON, fa3_bytes, kernels
from torch_hybrid.ops.flashinfer.scratch import Scratch
from torch_hybrid.ops.ragged_attention import _triton
from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse
from torch_hybrid.ops.triton.padding import set_padding

_FORM = "fa3"


def plan(
    lengths: Lengths,
    *,
    num_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    **_: int,
) -> Planned:
    """Plan FlashInfer's schedule for the causal call of a step, and where its parts begin."""
    scratch = Scratch.of(device)
    module = kernels(_FORM, dtype, head_dim, v_head_dim, False, False)
    first_keys = torch.nn.functional.pad(lengths.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    with scratch.lock:
        offsets = module.plan(
            scratch.workspace(64),  # it cuts no sequence, and writes no partial results
            scratch.ints,
            scratch.pinned,
            lengths.cu_seqlens,
            first_keys,
            lengths.seq_lens,
            lengths.num_tokens,
            lengths.seq_lens.shape[0],
            num_heads,
            num_heads,
            1,  # keys lie one after another, as in pages of one
            True,  # as for a CUDA graph
            head_dim,
            v_head_dim,
            True,  # causal
            -1,  # without a window
        )
        values = tuple(int(offset) for offset in offsets)
        schedule = scratch.pinned[: fa3_bytes(values)].clone()
    return Planned(tensors=(schedule,), values=values)


def ragged_attention_with_lse(x: RaggedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::ragged_attention_with_lse``."""
    q, k, v = x.q, x.k, x.v
    if not x.causal or q.numel() == 0:
        return _triton.ragged_attention_with_lse(x)
    schedule, values = x.planned or ()
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    kernels(_FORM, q.dtype, q.shape[2], v.shape[2], False, False).ragged_run(
        float_workspace_buffer=schedule,  # neither read nor written
        int_workspace_buffer=schedule,
        plan_info_vec=values.tolist(),
        q=q,
        k=k,
        v=v,
        qo_indptr=x.cu_seqlens_q,
        kv_indptr=x.cu_seqlens_k,
        o=out,
        maybe_lse=lse,
        window_left=-1,
        logits_soft_cap=0.0,
        sm_scale=x.scale,
        **COMMON,
    )
    set_padding(out, lse, x.cu_seqlens_q, lse_unit=math.log(2))  # FlashInfer's is of base 2
    return out, lse
