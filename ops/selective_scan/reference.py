"""The selective scan as its definition: one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.selective_scan.op import SelectiveScan


def selective_scan_reference(given: SelectiveScan) -> Tensor:
    """Compute both ops one token at a time, in float32 or, where ``x`` is float64, in float64."""
    x, dt, B, C, z, state = given.x, given.dt, given.B, given.C, given.z, given.state
    work = torch.promote_types(x.dtype, torch.float32)
    A, D = -given.A_log.to(work).exp(), given.D.to(work)
    bias = torch.zeros_like(D) if given.dt_bias is None else given.dt_bias.to(work)
    of_group = x.shape[1] // B.shape[1]

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for tokens, initial, slot in given.each_sequence():
        S = state[initial].to(work) if initial else torch.zeros_like(A)
        for t in tokens:
            x_t, step = x[t].to(work), F.softplus(dt[t].to(work) + bias)
            B_t, C_t = (rows[t].to(work).repeat_interleave(of_group, 0) for rows in (B, C))
            S = (step[:, None] * A).exp() * S + (step * x_t)[:, None] * B_t
            y = (S * C_t).sum(1) + D * x_t
            out[t] = y if z is None else y * F.silu(z[t].to(work))
        if slot:
            state[slot] = S
    return out
