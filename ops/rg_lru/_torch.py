"""The recurrence in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.pointwise import sigmoid
from torch_hybrid.ops.rg_lru.op import RgLru


def rg_lru(given: RgLru) -> Tensor:
    """Scan all tokens of all sequences."""
    x, state, cu_seqlens = given.x, given.state, given.cu_seqlens
    initial_indices, state_indices = given.initial_indices, given.state_indices
    work = torch.promote_types(x.dtype, torch.float32)
    num_tokens, num_seqs = x.shape[0], state_indices.shape[0]
    token = torch.arange(num_tokens, device=x.device, dtype=torch.int32)
    seq = torch.searchsorted(cu_seqlens[1:], token, right=True)
    is_padding = seq == num_seqs
    begin = cu_seqlens[seq]
    starts = token == begin

    # A sequence that starts from nothing has a row of zeros, as padding behind the last one has.
    is_new = torch.nn.functional.pad(initial_indices == 0, (0, 1), value=True)
    initial = state[initial_indices].to(work).where(~is_new[:-1, None], 0)
    initial = torch.nn.functional.pad(initial, (0, 0, 0, 1))

    input_gate, recurrent_gate = sigmoid(given.gates.to(work)).chunk(2, dim=-1)
    log_decay = recurrent_gate.flatten(1) * given.log_a.to(work)
    scale = (-torch.expm1(2 * log_decay)).sqrt()
    scale = scale.masked_fill((starts & is_new[seq])[:, None], 1.0)
    decay = log_decay.exp()
    added = scale * input_gate.flatten(1) * x.to(work)
    added = added + (decay * initial[seq]).where(starts[:, None], 0)

    added = scan(decay, added, token - begin)
    is_stored = (state_indices > 0) & (cu_seqlens.diff() > 0)
    last = cu_seqlens[1:][is_stored] - 1
    state[state_indices[is_stored]] = added[last].to(state.dtype)
    return added.masked_fill(is_padding[:, None], 0.0).to(x.dtype)


def scan(decay: Tensor, added: Tensor, position: Tensor) -> Tensor:
    """Compute the states [T, C] after each token by doubling.

    A token is the map ``h -> decay h + added``. After the pass of distance d it is that of itself
    and the 2 d - 1 tokens before it; none is of another sequence.

    Args:
        decay: [T, C]. added [T, C].
        position: [T] of each token in its sequence.
    """
    distance = 1
    while distance < len(added):
        is_joined = (position >= distance)[distance:, None]
        before = added[:-distance].where(is_joined, 0)
        so_far = decay[:-distance].where(is_joined, 1)
        added = torch.cat([added[:distance], added[distance:] + decay[distance:] * before])
        decay = torch.cat([decay[:distance], decay[distance:] * so_far])
        distance *= 2
    return added
