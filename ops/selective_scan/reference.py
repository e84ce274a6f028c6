"""The selective scan as its definition: one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """The oracle of both ops: same arguments, any float dtype, ``state`` updated in place.

    It computes in float32, or in float64 when ``x`` is float64.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    A, D = -A_log.to(work).exp(), D.to(work)
    of_group = x.shape[1] // B.shape[1]

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    offsets = cu_seqlens.tolist()
    slots = zip(initial_indices.tolist(), state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        if offsets[n] == offsets[n + 1]:
            continue
        S = state[initial].to(work) if initial else torch.zeros_like(A)
        for t in range(offsets[n], offsets[n + 1]):
            x_t, step = x[t].to(work), F.softplus(dt[t].to(work))
            B_t, C_t = (rows[t].to(work).repeat_interleave(of_group, 0) for rows in (B, C))
            S = (step[:, None] * A).exp() * S + (step * x_t)[:, None] * B_t
            y = (S * C_t).sum(1) + D * x_t
            out[t] = y if z is None else y * F.silu(z[t].to(work))
        if slot:
            state[slot] = S
    return out
