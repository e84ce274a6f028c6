"""Backward of the selective scan in vectorised torch: a walk back over the tokens.

A first walk keeps the states at the starts of chunks. From there, those of a chunk are recomputed,
and their gradients found from its last row on; products over all its rows give the rest. L rows of
a chunk, M sequences that have it, G groups of R channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.packed import empty_gradients
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.pointwise import sigmoid, softplus
from torch_hybrid.ops.ragged_chunks import chunk_steps, chunk_table, packed_sequences
from torch_hybrid.ops.selective_scan.training.op import TrainedSelectiveScan


@without_autocast
def selective_scan_backward(x: TrainedSelectiveScan) -> tuple[Tensor, ...]:
    """Compute the gradients of x, dt, A, B, C, D, z, dt_bias and the initial state."""
    grads = [each.zero_() for each in empty_gradients(x)]
    dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial = grads
    seqs = packed_sequences(x)
    chunks = chunk_table(seqs, DEFAULT_CHUNK_SIZE)
    steps = [_Chunk(x, chunks.token[c], chunks.is_real[c]) for c in chunk_steps(seqs, chunks)]

    def open_states(given: Tensor | None) -> Tensor:
        S = x.states(len(seqs.slots)).zero_() if given is None else given[seqs.slots]
        opened: Tensor = S.unflatten(1, (x.B.shape[1], -1))
        return opened

    S, starts = open_states(x.initial_state), []
    for chunk in steps:
        starts.append(S[: chunk.num_seqs].clone())
        S[: chunk.num_seqs] = chunk.walk(starts[-1])[:, -1]
    dS = open_states(x.dfinal_state)
    for chunk in reversed(steps):
        carry = dS[: chunk.num_seqs]
        of_chunk = chunk.walk_back(starts.pop(), carry)
        real = chunk.is_real
        rows = chunk.token[real]
        for grad, each in zip((dx, ddt, dB, dC, dz), of_chunk[:5], strict=True):
            if len(grad):
                grad[rows] = each[real].view(-1, *grad.shape[1:]).to(grad.dtype)
        for grad, each in zip((dA, dD, dbias), of_chunk[5:], strict=True):
            if len(grad):
                grad += each.view(grad.shape)
    if x.initial_state is not None:
        if x.dfinal_state is not None:
            dinitial.copy_(x.dfinal_state)
        dinitial[seqs.slots] = dS.flatten(1, 2)
    return tuple(grads)


class _Chunk:
    """Inputs of the chunks of M sequences, each [M, L, G, R] or, of B and C, [M, L, G, 1, N]."""

    def __init__(self, x: TrainedSelectiveScan, token: Tensor, is_real: Tensor) -> None:
        self.token, self.is_real, self.num_seqs = token, is_real, len(token)
        num_groups, work = x.B.shape[1], x.work

        def rows(given: Tensor) -> Tensor:
            by_group: Tensor = given[token].to(work).unflatten(2, (num_groups, -1))
            return by_group

        def of_channels(given: Tensor | None) -> Tensor | float:
            return 0.0 if given is None else given.unflatten(0, (num_groups, -1))

        self.x, self.A, self.D = rows(x.x), of_channels(x.A), of_channels(x.D)
        self.B, self.C = (each[token].to(work)[..., None, :] for each in (x.B, x.C))
        real = is_real[..., None, None]
        before = rows(x.dt) + of_channels(x.dt_bias)
        self.step = torch.where(real, softplus(before), 0.0)
        self.slope = torch.where(real, sigmoid(before), 0.0)
        self.decay = (self.step[..., None] * self.A).exp()  # [M, L, G, R, N]
        self.dout = torch.where(real, rows(x.dout), 0.0)
        self.z = None if x.z is None else rows(x.z)

    def walk(self, S: Tensor) -> Tensor:
        """Compute the states before the first row and after each, [M, 1 + L, G, R, N]."""
        added = (self.step * self.x)[..., None] * self.B
        states = [S]
        for i in range(added.shape[1]):
            states.append(self.decay[:, i] * states[-1] + added[:, i])
        return torch.stack(states, 1)

    def walk_back(self, S: Tensor, carry: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of x, dt, B, C, z, and of A, D and dt_bias by all rows.

        ``carry`` is the gradient of the states after the last row; that of ``S``, which are before
        the first, takes its place.
        """
        states = self.walk(S)
        y = (states[:, 1:] * self.C).sum(-1) + self.D * self.x
        dy, dz = self.dout, self.dout
        if self.z is not None:
            gate = sigmoid(self.z)
            dy = self.dout * self.z * gate
            dz = self.dout * y * gate * (1 + self.z * (1 - gate))
        dstates = dy[..., None] * self.C
        for i in reversed(range(dstates.shape[1])):
            dstates[:, i] += carry
            carry.copy_(self.decay[:, i] * dstates[:, i])
        by_decay = dstates * self.decay * states[:, :-1]
        dadded = (dstates * self.B).sum(-1)
        dstep = dadded * self.x + (by_decay * self.A).sum(-1)
        ddt = dstep * self.slope
        return (
            dadded * self.step + self.D * dy,
            ddt,
            (dstates * (self.step * self.x)[..., None]).sum(3),
            (states[:, 1:] * dy[..., None]).sum(3),
            dz,
            (by_decay * self.step[..., None]).sum((0, 1)),
            (dy * self.x).sum((0, 1)),
            ddt.sum((0, 1)),
        )
