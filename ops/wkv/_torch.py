"""The recurrence in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.wkv.op import NOTHING, Wkv


def wkv(x: Wkv) -> Tensor:
    """Scan all tokens of all sequences."""
    state, cu_seqlens, state_indices = x.state, x.cu_seqlens, x.state_indices
    dtype, work = x.k.dtype, torch.promote_types(x.k.dtype, torch.float32)
    num_tokens, num_seqs = x.k.shape[0], state_indices.shape[0]
    k, v, log_decay, bonus = (each.to(work) for each in (x.k, x.v, x.log_decay, x.bonus))
    token = torch.arange(num_tokens, device=k.device, dtype=torch.int32)
    seq = torch.searchsorted(cu_seqlens[1:], token, right=True)
    is_padding, begin = seq == num_seqs, cu_seqlens[seq]

    is_known = (x.initial_indices > 0)[:, None]
    initial = state[x.initial_indices].to(work).transpose(0, 1).where(is_known, nothing(k))
    one = torch.stack([v, torch.ones_like(v), k])
    before, after = scan(one, of_tokens(initial, seq), log_decay, token - begin)
    one[2] += bonus
    numerator, denominator, _ = joined(before, one)
    is_stored = (state_indices > 0) & (cu_seqlens.diff() > 0)
    last = cu_seqlens[1:][is_stored] - 1
    state[state_indices[is_stored]] = after[:, last].transpose(0, 1).to(state.dtype)
    out: Tensor = numerator / denominator
    return out.masked_fill(is_padding[:, None], 0.0).to(dtype)


def nothing(like: Tensor) -> Tensor:
    """Make the sums [3, 1, 1] of no tokens."""
    return like.new_tensor([0.0, 0.0, NOTHING])[:, None, None]


def of_tokens(initial: Tensor, seq: Tensor) -> Tensor:
    """Gather what each token's sequence starts from, sums [3, T, C]; padding has none."""
    row = nothing(initial).expand(3, 1, initial.shape[2])
    return torch.cat([initial, row], 1)[:, seq]


def scan(
    one: Tensor, initial: Tensor, log_decay: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the sums [3, T, C] before and after each token by doubling.

    Sums are [3, ...]: numerator, denominator, exponent. After the pass of distance d, those of a
    token are over itself and the 2 d - 1 tokens before it; none is of another sequence.

    Args:
        one: [3, T, C] what each token adds.
        initial: [3, T, C] what its sequence starts from.
        log_decay: [C].
        position: [T] of each token in its sequence.
    """
    starts, num_tokens = (position == 0)[:, None], len(position)
    sums = joined(_decayed(initial, log_decay).where(starts, nothing(one)), one)
    distance = 1
    while distance < num_tokens:
        is_joined = (position >= distance)[distance:, None]
        before = _decayed(sums[:, :-distance], distance * log_decay).where(is_joined, nothing(one))
        sums = torch.cat([sums[:, :distance], joined(before, sums[:, distance:])], 1)
        distance *= 2
    return initial.where(starts, F.pad(sums, (0, 0, 1, 0))[:, :num_tokens]), sums


def _decayed(sums: Tensor, log_decay: Tensor) -> Tensor:
    return torch.stack([sums[0], sums[1], sums[2] + log_decay])


def joined(a: Tensor, b: Tensor) -> Tensor:
    """Add two sums, by the larger of their exponents."""
    exponent = torch.maximum(a[2], b[2])
    joined = (a[2] - exponent).exp() * a[:2] + (b[2] - exponent).exp() * b[:2]
    return torch.cat([joined, exponent[None]])
