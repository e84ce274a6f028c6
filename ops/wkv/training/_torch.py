"""Backward of RWKV's weighted average of past values in vectorised torch: a scan each way.

Gradients of states are sums of later tokens as states are of past ones, decays and exponents too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.wkv._torch import joined, nothing, of_tokens, scan
from torch_hybrid.ops.wkv.training.op import TrainedWkv


@without_autocast
def wkv_backward(x: TrainedWkv) -> tuple[Tensor, ...]:
    """Compute the gradients of k, v, log_decay, bonus and the initial state."""
    work, num_tokens, num_seqs = x.log_decay.dtype, x.k.shape[0], x.num_seqs
    token = torch.arange(num_tokens, device=x.k.device, dtype=torch.int32)
    seq = torch.searchsorted(x.cu_seqlens[1:], token, right=True)
    is_real = (seq < num_seqs)[:, None]
    # Padding is a sequence of tokens that are all 0.
    begin, end = x.cu_seqlens[seq], pad(x.cu_seqlens, (0, 1), value=num_tokens)[seq + 1]
    k, v, dout = (each.to(work).where(is_real, 0) for each in (x.k, x.v, x.dout))

    none = nothing(k).expand(3, num_seqs, k.shape[1])
    initial = none if x.initial_state is None else x.initial_state.transpose(0, 1)
    one = torch.stack([v, torch.ones_like(v), k])
    before, after = scan(one, of_tokens(initial, seq), x.log_decay, token - begin)
    own = torch.stack([*one[:2], k + x.bonus])
    numerator, denominator, exponent = joined(before, own)
    out, dall = numerator / denominator, dout / denominator

    # A final state's exponent is that of its last token, or its initial one.
    is_live = x.cu_seqlens.diff() > 0
    final = initial.clone()
    final[:, is_live] = after[:, x.cu_seqlens[1:][is_live] - 1]
    dfinal, dexponent = none, k.new_zeros(num_seqs, k.shape[1])
    if x.dfinal_state is not None:
        above, below, dexponent = x.dfinal_state.unbind(1)
        dfinal = torch.stack([above, below, -final[2]])
        dexponent = dexponent - above * final[0] - below * final[1]
    later = torch.stack([dall, -dall * out, -exponent]).flip(1)
    back = (end - 1 - token).flip(0)
    dafter, dbefore = (
        each.flip(1) for each in scan(later, of_tokens(dfinal, seq).flip(1), x.log_decay, back)
    )

    seen = (k + dafter[2]).exp()
    weight = (own[2] - exponent).exp() * dall
    down = weight * (v - out)
    decayed = (x.log_decay + before[2] + dafter[2]).exp()
    dk = seen * (dafter[0] * v + dafter[1]) + down
    dlog_decay = decayed * (dafter[0] * before[0] + dafter[1] * before[1])
    # An exponent's gradient goes to the last token whose key was larger than what was before.
    is_kept = before[2] + x.log_decay > k
    place = token.long()[:, None].expand_as(k)
    last = place.new_full((num_seqs + 1, k.shape[1]), -1).scatter_reduce(
        0, seq[:, None].expand_as(k), place.masked_fill(is_kept, -1), "amax"
    )
    dexponents = pad(dexponent, (0, 0, 0, 1))[seq]
    dk = dk + dexponents.where(place == last[seq], 0)
    dlog_decay = dlog_decay + dexponents.where(place > last[seq], 0)
    dinitial = x.states(0)
    if x.initial_state is not None:
        dstart = dfinal.clone()
        dstart[:, is_live] = dbefore[:, x.cu_seqlens[:-1][is_live]]
        dsums = (initial[2] + dstart[2]).exp() * dstart[:2]
        left = dexponent.where(last[:-1] < 0, 0) + (dsums * initial[:2]).sum(0)
        dinitial = torch.stack([*dsums, left], 1)
    return (
        dk.where(is_real, 0).to(x.k.dtype),
        (seen * dafter[0] + weight).where(is_real, 0).to(x.k.dtype),
        dlog_decay.where(is_real, 0).sum(0),
        down.sum(0),
        dinitial,
    )
