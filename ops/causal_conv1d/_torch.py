"""The convolution in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.causal_conv1d.op import CausalConv1d
from torch_hybrid.ops.pointwise import silu


def causal_conv1d(x: CausalConv1d) -> Tensor:
    """Put each sequence behind its state in one long array, in which the taps are plain shifts.

    Sequence n begins there at ``cu_seqlens[n] + n * (W - 1)`` with its state. So the row of a
    token and the first row that its window covers differ by W - 1 for every token.
    """
    inputs = x.x if x.input_gate is None else x.input_gate * x.x
    cu_seqlens, state_indices = x.cu_seqlens, x.state_indices
    num_tokens, num_seqs, num_past = inputs.shape[0], state_indices.shape[0], x.weight.shape[1] - 1
    seq = torch.searchsorted(
        cu_seqlens[1:],
        torch.arange(num_tokens, device=inputs.device, dtype=torch.int32),
        right=True,
    )
    window = torch.arange(num_tokens, device=inputs.device, dtype=torch.int64) + seq * num_past
    past = torch.arange(num_past, device=inputs.device, dtype=torch.int64)

    padded = inputs.new_zeros(num_tokens + (num_seqs + 1) * num_past, inputs.shape[1])
    padded[window + num_past] = inputs
    first = (
        cu_seqlens[:-1] + torch.arange(num_seqs, device=inputs.device, dtype=torch.int64) * num_past
    )
    initial = x.conv_state[x.initial_indices].where((x.initial_indices > 0)[:, None, None], 0)
    padded[first[:, None] + past] = initial

    work = torch.promote_types(inputs.dtype, torch.float32)
    out = torch.zeros_like(inputs, dtype=work, memory_format=torch.contiguous_format)
    for tap, filter_row in enumerate(x.weight.to(work).T):
        if x.token_taps is not None:
            of_heads = x.token_taps[:, :, tap].to(work)
            filter_row = filter_row + of_heads.repeat_interleave(
                inputs.shape[1] // of_heads.shape[1], 1
            )
        out.addcmul_(padded[window + tap].to(work), filter_row)
    if x.bias is not None:
        out += x.bias.to(work)
    if x.silu:
        out = silu(out)
    if x.output_gate is not None:
        out *= x.output_gate.to(work)

    is_stored = (state_indices > 0) & (cu_seqlens.diff() > 0)
    last = first + cu_seqlens.diff()
    x.conv_state[state_indices[is_stored]] = padded[last[is_stored][:, None] + past]
    is_padding = seq == num_seqs
    return out.masked_fill_(is_padding[:, None], 0.0).to(inputs.dtype)
