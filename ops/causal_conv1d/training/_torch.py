"""Backward of the short convolution in vectorised torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.causal_conv1d.training.op import TrainedCausalConv1d
from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.pointwise import sigmoid


@without_autocast
def causal_conv1d_backward(x: TrainedCausalConv1d) -> tuple[Tensor, ...]:
    """Put each sequence behind its state in one long array, as the forward does.

    A tap is a shift there. So gradients of taps are sums over tokens, and those of inputs are taps
    that run the other way. The W - 1 rows at the end of a sequence are its final state.
    """
    (num_tokens, channels), past = x.x.shape, x.weight.shape[1] - 1
    work = torch.promote_types(x.x.dtype, torch.float32)
    token = torch.arange(num_tokens, dtype=torch.int64, device=x.x.device)
    seq = torch.searchsorted(x.cu_seqlens[1:], token.to(torch.int32), right=True)
    window, of_state = token + seq * past, torch.arange(past, dtype=torch.int64, device=x.x.device)
    starts = (
        x.cu_seqlens.long()
        + torch.arange(x.num_seqs + 1, dtype=torch.int64, device=x.x.device) * past
    )
    state_rows = starts[:-1, None] + of_state
    padded = x.x.new_zeros(num_tokens + (x.num_seqs + 1) * past, channels, dtype=work)
    is_padding = (seq == x.num_seqs)[:, None]
    padded[window + past] = x.x.to(work).masked_fill(is_padding, 0.0)
    if x.initial_state is not None:
        padded[state_rows] = x.initial_state.to(work)

    taps = x.weight.to(work).T
    dy = x.dout.to(work).masked_fill(is_padding, 0.0)
    if x.silu:
        y = torch.zeros_like(dy) if x.bias is None else x.bias.to(work).expand_as(dy).clone()
        for w, tap in enumerate(taps):
            y.addcmul_(padded[window + w], tap)
        gate = sigmoid(y)
        dy = dy * gate * (1 + y * (1 - gate))
    dpadded = torch.zeros_like(padded)
    if x.dfinal_state is not None:
        dpadded[state_rows + x.cu_seqlens.diff()[:, None]] = x.dfinal_state.to(work)
    dtaps = []
    for w, tap in enumerate(taps):
        dtaps.append((dy * padded[window + w]).sum(0))
        dpadded[window + w] += dy * tap
    dx, dweight = dpadded[window + past], torch.stack(dtaps, 1)
    dbias = dy.sum(0) if x.bias is not None else dy.new_empty(0)
    dstate = dpadded[state_rows[: 0 if x.initial_state is None else None]]
    dtype = x.x.dtype
    return dx.to(dtype), dweight.to(dtype), dbias.to(dtype), dstate.to(dtype)
