"""The convolution in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.pointwise import silu


def causal_conv1d(
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
    """Put each sequence behind its state in one long array, in which the taps are plain shifts.

    Sequence n begins there at ``cu_seqlens[n] + n * (W - 1)`` with its state, so the row of a
    token and the first row that its window covers differ by W - 1 for every token.
    """
    if x.device.type == "cpu":
        check_state_indices(
            cu_seqlens,
            initial_indices,
            state_indices,
            num_tokens=x.shape[0],
            num_slots=conv_state.shape[0],
        )
    x = x if input_gate is None else input_gate * x
    num_tokens, num_seqs, num_past = x.shape[0], state_indices.shape[0], weight.shape[1] - 1
    seq = torch.searchsorted(
        cu_seqlens[1:], torch.arange(num_tokens, device=x.device, dtype=torch.int32), right=True
    )
    window = torch.arange(num_tokens, device=x.device, dtype=torch.int64) + seq * num_past
    past = torch.arange(num_past, device=x.device, dtype=torch.int64)

    padded = x.new_zeros(num_tokens + (num_seqs + 1) * num_past, x.shape[1])
    padded[window + num_past] = x
    first = cu_seqlens[:-1] + torch.arange(num_seqs, device=x.device, dtype=torch.int64) * num_past
    initial = conv_state[initial_indices].where((initial_indices > 0)[:, None, None], 0)
    padded[first[:, None] + past] = initial

    work = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, dtype=work, memory_format=torch.contiguous_format)
    for tap, filter_row in enumerate(weight.to(work).T):
        if token_taps is not None:
            of_heads = token_taps[:, :, tap].to(work)
            filter_row = filter_row + of_heads.repeat_interleave(x.shape[1] // of_heads.shape[1], 1)
        out.addcmul_(padded[window + tap].to(work), filter_row)
    if bias is not None:
        out += bias.to(work)
    if activation == "silu":
        out = silu(out)
    if output_gate is not None:
        out *= output_gate.to(work)

    is_stored = (state_indices > 0) & (cu_seqlens.diff() > 0)
    last = first + cu_seqlens.diff()
    conv_state[state_indices[is_stored]] = padded[last[is_stored][:, None] + past]
    is_padding = seq == num_seqs
    return out.masked_fill_(is_padding[:, None], 0.0).to(x.dtype)
