"""The convolution as its definition: one token after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    token_taps: Tensor | None = None,
) -> Tensor:
    """The oracle of the op: same arguments, any float dtype, ``conv_state`` updated in place.

    It computes in float32, or in float64 when ``x`` is float64.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(compute).T
    shift = torch.zeros_like(taps[0]) if bias is None else bias.to(compute)
    x = x if input_gate is None else input_gate * x

    if token_taps is not None:
        per_head = x.shape[1] // token_taps.shape[1]
        own_taps = token_taps.to(compute).repeat_interleave(per_head, 1).mT
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    offsets = cu_seqlens.tolist()
    slots = zip(initial_indices.tolist(), state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        if offsets[n] == offsets[n + 1]:
            continue
        past = conv_state[initial] if initial else torch.zeros_like(conv_state[initial])
        for t in range(offsets[n], offsets[n + 1]):
            window = torch.cat([past, x[t : t + 1]])
            filters = taps if token_taps is None else taps + own_taps[t]
            y = shift + (window.to(compute) * filters).sum(0)
            y = F.silu(y) if activation == "silu" else y
            out[t] = y if output_gate is None else output_gate[t].to(compute) * y
            past = window[1:]
        if slot:
            conv_state[slot] = past
    return out
