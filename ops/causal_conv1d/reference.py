"""The convolution as its definition: one token after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.causal_conv1d.op import CausalConv1d


def causal_conv1d_reference(x: CausalConv1d) -> Tensor:
    """Compute the op in any float dtype; ``conv_state`` is updated in place.

    It computes in float32, or in float64 when ``x`` is float64.
    """
    compute = torch.promote_types(x.x.dtype, torch.float32)
    taps = x.weight.to(compute).T
    shift = torch.zeros_like(taps[0]) if x.bias is None else x.bias.to(compute)
    inputs = x.x if x.input_gate is None else x.input_gate * x.x

    if x.token_taps is not None:
        per_head = inputs.shape[1] // x.token_taps.shape[1]
        own_taps = x.token_taps.to(compute).repeat_interleave(per_head, 1).mT
    out = torch.zeros_like(inputs, memory_format=torch.contiguous_format)
    for tokens, initial, slot in x.each_sequence():
        past = x.conv_state[initial] if initial else torch.zeros_like(x.conv_state[initial])
        for t in tokens:
            window = torch.cat([past, inputs[t : t + 1]])
            filters = taps if x.token_taps is None else taps + own_taps[t]
            y = shift + (window.to(compute) * filters).sum(0)
            y = F.silu(y) if x.silu else y
            out[t] = y if x.output_gate is None else x.output_gate[t].to(compute) * y
            past = window[1:]
        if slot:
            x.conv_state[slot] = past
    return out
