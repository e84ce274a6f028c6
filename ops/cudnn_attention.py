"""Attention to packed sequences by cuDNN, as torch calls it: what implementations "cudnn" share.

cuDNN's causal mask counts queries and keys from the first of each sequence, so it is ours where a
sequence has as many keys as queries: where nothing was held before. That is a fact of the lengths
on the host. The lengths themselves are read on the device, and a captured graph serves any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.planning import Lengths, Planned
from torch_hybrid.ops.triton.devices import triton_missing

_LEAST_VERSION = 90600  # the first that takes packed sequences with fewer heads of keys
_MOST_ELEMENTS = 2**31  # cuDNN counts them in 32 bits
_MEASURED = frozenset({(9, 0)})

forward = torch.ops.aten._cudnn_attention_forward


def cudnn_missing() -> str | None:
    """Why cuDNN does not attend here, or None when it does."""
    if not torch.cuda.is_available():
        return triton_missing()
    version = torch.backends.cudnn.version()
    if version is None or version < _LEAST_VERSION:
        return f"cuDNN must be {_LEAST_VERSION} or later, got {version}"
    if (capability := torch.cuda.get_device_capability()) not in _MEASURED:
        return f"it was measured on sm_90 alone, the device is sm_{capability[0]}{capability[1]}"
    return triton_missing()


def plan(lengths: Lengths, **_: object) -> Planned:
    """Whether every sequence has as many keys as queries."""
    no_prefix = torch.equal(lengths.cu_seqlens.diff(), lengths.seq_lens)
    return Planned(tensors=(), values=(int(no_prefix),))


def attends(q: Tensor, k: Tensor, v: Tensor, planned: list[Tensor]) -> bool:
    """Whether cuDNN takes a call of these shapes, for which ``plan`` made ``planned``."""
    (values,) = planned
    counts = [max(x.stride(0), x.shape[1] * x.shape[2]) * x.shape[0] for x in (q, k, v)]
    return bool(values.item()) and min(counts) > 0 and max(counts) < _MOST_ELEMENTS


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Causal attention of each sequence to itself; rows of padding are left as they are.

    Returns:
        [T, H, Dv] in the dtype of q, and the natural-log LSE [T, H] float32, or nothing of it.
    """
    longest = q.shape[0]
    out, lse, *_ = forward(
        q,
        k,
        v,
        None,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        with_lse,
        is_causal=True,
        scale=scale,
    )
    return out, lse
