"""The recurrence as its definition: one token after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rg_lru_reference(
    x: Tensor,
    gates: Tensor,
    log_a: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """The oracle of the op: same arguments, any float dtype, ``state`` updated in place.

    It computes in float32, or in float64 when ``x`` is float64.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    input_gate, recurrent_gate = gates.to(work).sigmoid().chunk(2, dim=-1)
    log_decay = recurrent_gate.flatten(1) * log_a.to(work)
    gated = input_gate.flatten(1) * x.to(work)

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    offsets = cu_seqlens.tolist()
    slots = zip(initial_indices.tolist(), state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        if offsets[n] == offsets[n + 1]:
            continue
        h = state[initial].to(work) if initial else torch.zeros_like(state[0], dtype=work)
        for t in range(offsets[n], offsets[n + 1]):
            is_first = t == offsets[n] and not initial
            scale = 1.0 if is_first else (-torch.expm1(2 * log_decay[t])).sqrt()
            h = log_decay[t].exp() * h + scale * gated[t]
            out[t] = h
        if slot:
            state[slot] = h
    return out
