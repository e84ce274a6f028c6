"""The recurrence as its definition: one token after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.wkv.op import NOTHING, Wkv


def wkv_reference(x: Wkv) -> Tensor:
    """Compute the op one token at a time, in float32 or, where ``k`` is float64, in float64."""
    k, v, state = x.k, x.v, x.state
    work = torch.promote_types(k.dtype, torch.float32)
    log_decay, bonus = x.log_decay.to(work), x.bonus.to(work)
    nothing = state.new_tensor([0.0, 0.0, NOTHING])[:, None].expand(state.shape[1:])
    out = torch.zeros_like(k, memory_format=torch.contiguous_format)
    for tokens, initial, slot in x.each_sequence():
        sums = (state[initial] if initial else nothing).to(work)
        for t in tokens:
            value = v[t].to(work)
            numerator, denominator, _ = _added(sums, k[t].to(work) + bonus, value)
            out[t] = numerator / denominator
            decayed = torch.stack([*sums[:2], sums[2] + log_decay])
            sums = _added(decayed, k[t].to(work), value)
        if slot:
            state[slot] = sums
    return out


def _added(sums: Tensor, exponent: Tensor, value: Tensor) -> Tensor:
    """Add to sums [3, C] a value of weight e^exponent, by the larger of both exponents."""
    largest = torch.maximum(sums[2], exponent)
    before, own = (sums[2] - largest).exp(), (exponent - largest).exp()
    return torch.stack([before * sums[0] + own * value, before * sums[1] + own, largest])
