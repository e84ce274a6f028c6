"""Attention of whole prompts by cuDNN, as torch calls it: what implementations "cudnn" share.

A step is for cuDNN where its sequences begin, are of one length, and fill it: one prompt, or the
first part of one, as long as the step's bucket; or several of one length. The lengths on the host
tell, so it is a value of the plan, and part of what a graph is captured for.

cuDNN packs sequences of any lengths too, but torch (2.11) then has cuDNN plan anew at each call:
45 ms of the host, which cannot be captured. Its causal mask counts from the first key, so it is
another than ours where a sequence has more keys than queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths, Planned
from torch_hybrid.ops.triton.devices import triton_missing

_TESTED_FROM = 91900
_SHORTEST = 128  # tokens of a prompt; below them nothing was measured
_MEASURED = frozenset({(9, 0)})
_MOST_ELEMENTS = 2**31  # torch's key of cuDNN's plans has strides of 32 bits

forward = torch.ops.aten._scaled_dot_product_cudnn_attention


def cudnn_missing() -> str | None:
    """Say why cuDNN does not attend here, or None when it does."""
    if not torch.cuda.is_available():
        return triton_missing()
    version = torch.backends.cudnn.version()
    if version is None or version < _TESTED_FROM:
        return f"cuDNN must be {_TESTED_FROM} or later, got {version}"
    if (capability := torch.cuda.get_device_capability()) not in _MEASURED:
        return f"it was measured on sm_90 alone, the device is sm_{capability[0]}{capability[1]}"
    return triton_missing()


def plan(lengths: Lengths, **_: object) -> Planned:
    """Count the sequences of one length that make up the step; 0 where it is another step."""
    new = lengths.cu_seqlens.diff()
    num_seqs = int((new > 0).sum())
    length = lengths.num_tokens // max(num_seqs, 1)
    fill = num_seqs * length == lengths.num_tokens and bool((new[new > 0] == length).all())
    for_cudnn = length >= _SHORTEST and fill and torch.equal(new, lengths.seq_lens)
    return Planned(tensors=(), values=(num_seqs if for_cudnn else 0,))


def num_prompts(q: Tensor, k: Tensor, v: Tensor, planned: Sequence[Tensor]) -> int:
    """Count the sequences that cuDNN is to attend to, as ``plan`` planned; 0 where the call is not
    for it."""
    (values,) = planned
    spans = [x.shape[0] * x.stride(0) for x in (q, k, v)]
    return int(values.item()) if max(spans) < _MOST_ELEMENTS else 0


def attend(
    q: Tensor, k: Tensor, v: Tensor, num_seqs: int, *, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Attend causally within each of ``num_seqs`` sequences of one length.

    Returns:
        [T, H, Dv] in the dtype of q, and the natural-log LSE [T, H] float32, or nothing of it.
    """
    by_head = [x.unflatten(0, (num_seqs, -1)).transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = forward(*by_head, None, with_lse, is_causal=True, scale=scale)
    # Heads are outermost where those of q are: a copy then.
    out = out.transpose(1, 2).contiguous().view(*q.shape[:2], v.shape[2])
    if with_lse:
        lse = lse.view(num_seqs, q.shape[1], -1).transpose(1, 2).contiguous().view(q.shape[:2])
    return out, lse
