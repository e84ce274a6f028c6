"""Backward of real-gated linear recurrent units in vectorised torch: a scan each way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.pointwise import sigmoid
from torch_hybrid.ops.rg_lru._torch import scan
from torch_hybrid.ops.rg_lru.training.op import MAX_SQRT_GRADIENT, TrainedRgLru


@without_autocast
def rg_lru_backward(x: TrainedRgLru) -> tuple[Tensor, ...]:
    """Compute the gradients of x, the gates, log_a and the initial state."""
    work, num_tokens = x.log_a.dtype, x.x.shape[0]
    token = torch.arange(num_tokens, device=x.x.device, dtype=torch.int32)
    seq = torch.searchsorted(x.cu_seqlens[1:], token, right=True)
    is_real = (seq < x.num_seqs)[:, None]
    # Padding is a sequence of tokens that are all 0.
    begin, end = x.cu_seqlens[seq], pad(x.cu_seqlens, (0, 1), value=num_tokens)[seq + 1]
    starts, ends = (token == begin)[:, None], (token == end - 1)[:, None]
    rows, gates, dout = (
        each.to(work).where(is_real.view(-1, *[1] * (each.ndim - 1)), 0)
        for each in (x.x, x.gates, x.dout)
    )

    input_gate, recurrent_gate = (each.flatten(1) for each in sigmoid(gates).chunk(2, -1))
    log_decay = recurrent_gate * x.log_a
    decay = log_decay.exp()
    is_new = starts if x.initial_state is None else torch.zeros_like(starts)
    scale = (-torch.expm1(2 * log_decay)).sqrt()
    dscale = -(decay.square()) / scale.clamp(min=0.5 / MAX_SQRT_GRADIENT)  # by log_decay
    scale, dscale = scale.masked_fill(is_new, 1.0), dscale.masked_fill(is_new, 0.0)
    gated = input_gate * rows

    before = _states(x.initial_state, x, seq).where(starts, 0)
    after = scan(decay, scale * gated + decay * before, token - begin)
    before = before.where(starts, pad(after, (0, 0, 1, 0))[:num_tokens])
    # What a token hands back is by the decay of the token after it.
    handed = pad(decay, (0, 0, 0, 1))[1:].flip(0)
    left = dout + _states(x.dfinal_state, x, seq).where(ends, 0)
    dstate = scan(handed, left.flip(0), (end - 1 - token).flip(0)).flip(0)

    dgated = scale * dstate
    dlog_decay = dstate * (decay * before + dscale * gated)
    dgates = [
        dgated * rows * input_gate * (1 - input_gate),
        dlog_decay * x.log_a * recurrent_gate * (1 - recurrent_gate),
    ]
    num_heads = x.gates.shape[1]
    dinitial = x.states(0)
    if x.initial_state is not None:
        dfinal = x.dfinal_state
        dinitial = x.states(x.num_seqs).zero_() if dfinal is None else dfinal.clone()
        is_live = x.cu_seqlens.diff() > 0
        dinitial[is_live] = (decay * dstate)[x.cu_seqlens[:-1][is_live]]
    return (
        (dgated * input_gate).to(x.x.dtype),
        torch.cat([each.unflatten(1, (num_heads, -1)) for each in dgates], -1).to(x.x.dtype),
        (dlog_decay * recurrent_gate).sum(0),
        dinitial,
    )


def _states(states: Tensor | None, x: TrainedRgLru, seq: Tensor) -> Tensor:
    """Gather the states [T, C] of each token's sequence; padding has zeros, as None has."""
    if states is None:
        return x.log_a.new_zeros(1, x.log_a.shape[0]).expand(len(seq), -1)
    return pad(states, (0, 0, 0, 1))[seq]
