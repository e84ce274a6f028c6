"""The recurrence in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.wkv.op import Wkv

# The exponent of a state of nothing: sums have no part of it, whatever they decay by.
_NOTHING = -1e38


def wkv(x: Wkv) -> Tensor:
    """Scan all tokens of all sequences by doubling.

    Sums are [3, ...]: numerator, denominator, exponent. After the pass of distance d, those of a
    token are over itself and the 2 d - 1 tokens before it; none is of another sequence.
    """
    state, cu_seqlens, state_indices = x.state, x.cu_seqlens, x.state_indices
    dtype, work = x.k.dtype, torch.promote_types(x.k.dtype, torch.float32)
    num_tokens, num_seqs = x.k.shape[0], state_indices.shape[0]
    k, v, log_decay, bonus = (each.to(work) for each in (x.k, x.v, x.log_decay, x.bonus))
    token = torch.arange(num_tokens, device=k.device, dtype=torch.int32)
    seq = torch.searchsorted(cu_seqlens[1:], token, right=True)
    is_padding, begin = seq == num_seqs, cu_seqlens[seq]
    starts = (token == begin)[:, None]

    # A sequence that starts from nothing has such a row, as padding behind the last one has.
    nothing = k.new_tensor([0.0, 0.0, _NOTHING])[:, None, None]
    is_known = (x.initial_indices > 0)[:, None]
    initial = state[x.initial_indices].to(work).transpose(0, 1).where(is_known, nothing)
    initial = torch.cat([initial, nothing.expand(3, 1, k.shape[1])], 1)[:, seq]

    one = torch.stack([v, torch.ones_like(v), k])
    sums = _joined(_decayed(initial, log_decay).where(starts, nothing), one)
    distance = 1
    while distance < num_tokens:
        is_joined = (token - distance >= begin)[distance:, None]
        before = _decayed(sums[:, :-distance], distance * log_decay).where(is_joined, nothing)
        sums = torch.cat([sums[:, :distance], _joined(before, sums[:, distance:])], 1)
        distance *= 2

    before = F.pad(sums, (0, 0, 1, 0))[:, :num_tokens]
    one[2] += bonus
    numerator, denominator, _ = _joined(initial.where(starts, before), one)
    is_stored = (state_indices > 0) & (cu_seqlens.diff() > 0)
    last = cu_seqlens[1:][is_stored] - 1
    state[state_indices[is_stored]] = sums[:, last].transpose(0, 1).to(state.dtype)
    out: Tensor = numerator / denominator
    return out.masked_fill(is_padding[:, None], 0.0).to(dtype)


def _decayed(sums: Tensor, log_decay: Tensor) -> Tensor:
    return torch.stack([sums[0], sums[1], sums[2] + log_decay])


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """Add two sums, by the larger of their exponents."""
    exponent = torch.maximum(a[2], b[2])
    joined = (a[2] - exponent).exp() * a[:2] + (b[2] - exponent).exp() * b[:2]
    return torch.cat([joined, exponent[None]])
