"""Causal attention within the sequences of packed rows, by kernels of torch that train."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.core.autograd import check_no_tangents
from torch_hybrid.ops.packed_attention import packed_attention_forward
from torch_hybrid.ops.packed_attention.reference import masked_attention

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_MULTIPLE, _VARLEN_DIM = 8, 256  # of a head


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attend from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K], float dtype. k [T, HKV, K] and v [T, HKV, V] in that dtype.
        cu_seqlens: [N + 1] int32 offsets from 0 to T; equal ones are empty sequences.
        scale: factor on products.
        dropout: probability to drop a weight. Above 0 a T x T mask is made; on a GPU for float32,
            for heads wider than 256, and before Ampere too.

    Returns:
        [T, H, V].
    """
    check_no_tangents("packed_attention", q, k, v)
    if q.device.type == "cpu" and not dropout:
        return packed_attention_forward(q, k, v, cu_seqlens, scale=scale, impl="torch")[0]
    if q.is_cuda and not dropout and _fits_varlen(q, v):
        return _varlen(q, k, v, cu_seqlens, scale)
    return masked_attention(q, k, v, cu_seqlens, scale=scale, dropout=dropout)


def _fits_varlen(q: Tensor, v: Tensor) -> bool:
    if q.dtype not in _VARLEN_DTYPES or max(q.shape[2], v.shape[2]) > _VARLEN_DIM:
        return False
    return torch.cuda.get_device_capability(q.device)[0] >= 8


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Run flash attention, whose heads of q, k and v have one width: zeros are appended."""
    from torch.nn.attention.varlen import varlen_attn

    length, v_dim = len(q), v.shape[2]
    dim = -(-max(q.shape[2], v_dim) // _VARLEN_MULTIPLE) * _VARLEN_MULTIPLE
    q, k, v = (pad(x, (0, dim - x.shape[2])) for x in (q, k, v))
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, length, length,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[..., :v_dim]
