"""The recurrence as its definition: one token after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.rg_lru.op import RgLru


def rg_lru_reference(given: RgLru) -> Tensor:
    """Compute the op one token at a time, in float32 or, where ``x`` is float64, in float64."""
    x, state = given.x, given.state
    work = torch.promote_types(x.dtype, torch.float32)
    input_gate, recurrent_gate = given.gates.to(work).sigmoid().chunk(2, dim=-1)
    log_decay = recurrent_gate.flatten(1) * given.log_a.to(work)
    gated = input_gate.flatten(1) * x.to(work)

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for tokens, initial, slot in given.each_sequence():
        h = state[initial].to(work) if initial else torch.zeros_like(state[0], dtype=work)
        for t in tokens:
            is_first = t == tokens.start and not initial
            scale = 1.0 if is_first else (-torch.expm1(2 * log_decay[t])).sqrt()
            h = log_decay[t].exp() * h + scale * gated[t]
            out[t] = h
        if slot:
            state[slot] = h
    return out
