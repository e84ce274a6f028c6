"""Backward of linear attention with a scalar decay in vectorised torch, from the chunk form.

What a chunk knows without its state is computed for all chunks at once. Two scans follow: states
forwards, as the forward had them, and their gradients backwards. Products over all chunks at once
then give the gradients of inputs. X chunks, G groups of R heads, C rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.packed import empty_gradients
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.ragged_chunks import (
    FULL_DECAY,
    Chunks,
    Sequences,
    before_row,
    chunk_steps,
    chunk_table,
    from_row_on,
    packed_sequences,
    scatter_rows,
)
from torch_hybrid.ops.ssd.training.op import TrainedSsd


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """Inputs of all chunks, and what follows from them without a state."""

    q: Tensor  # [X, G, 1, C, K], scaled
    k: Tensor  # [X, G, 1, C, K]
    v: Tensor  # [X, G, R, C, V]
    dt: Tensor  # [X, G, R, C, 1]; 0 past the end of a sequence
    dout: Tensor  # [X, G, R, C, V]; 0 there
    since_start: Tensor  # [X, G, R, C, 1] decay from the start of the chunk to each row
    to_end: Tensor  # [X, G, R, C, 1] decay from each row to the end
    pairs: Tensor  # [X, G, R, C, C] decay from each row to those at and after it

    @property
    def u(self) -> Tensor:
        """Values by their weight in the state."""
        return self.dt * self.v

    @property
    def whole(self) -> Tensor:
        """Decay of each chunk [X, G, R, 1, 1]."""
        return self.since_start[..., -1:, :]


@without_autocast
def ssd_backward(x: TrainedSsd) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, g, dt, D and the initial state."""
    seqs = packed_sequences(x)
    chunks = chunk_table(seqs, DEFAULT_CHUNK_SIZE)
    given = _gather(x, chunks)
    S = _scan_states(x, seqs, chunks, given)
    dS, dinitial = _scan_gradients(x, seqs, chunks, given)
    dq, dk, du, dg = _inside_chunks(given, S, dS)
    dv, ddt = given.dt * du, (du * given.v).sum(-1, keepdim=True)
    _, _, _, _, no_dt, dD, _ = empty_gradients(x)
    if x.D is not None:
        own = (given.dout * given.v).sum(-1)  # [X, G, R, C]
        dD = own.sum((0, 3)).flatten()
        dv += x.D.unflatten(0, dv.shape[1:3])[..., None, None] * given.dout
    grads = ((x.scale * dq, x.q), (dk, x.k), (dv, x.v), (dg, x.g))
    return (
        *(scatter_rows(grad.flatten(1, 2), like, chunks) for grad, like in grads),
        no_dt if x.dt is None else scatter_rows(ddt.flatten(1, 2), x.dt, chunks),
        dD,
        dinitial,
    )


def _gather(x: TrainedSsd, chunks: Chunks) -> _Given:
    """Gather the rows of all chunks."""
    is_real, num_groups = chunks.is_real[:, None, None, :, None], x.k.shape[1]

    def rows(tensor: Tensor) -> Tensor:
        """Gather rows [X, G, R, C, .] of ``tensor [T, H, .]``."""
        by_head = tensor[chunks.token].to(x.work).transpose(1, 2)
        by_group: Tensor = by_head.unflatten(1, (num_groups, -1))
        return by_group

    # In float64: a difference of two large sums must not lose a small decay between them.
    g = torch.where(is_real, rows(x.g[..., None]).clamp(min=FULL_DECAY), 0.0)[..., 0]
    G = g.double().cumsum(-1)
    dt = torch.ones_like(x.g) if x.dt is None else x.dt
    return _Given(
        q=x.scale * rows(x.q),
        k=rows(x.k),
        v=rows(x.v),
        dt=torch.where(is_real, rows(dt[..., None]), 0.0),
        dout=torch.where(is_real, rows(x.dout), 0.0),
        since_start=G.to(x.work).exp()[..., None],
        to_end=(G[..., -1:] - G).to(x.work).exp()[..., None],
        pairs=(G[..., :, None] - G[..., None, :]).to(x.work).tril().exp().tril(),
    )


def _scan_states(x: TrainedSsd, seqs: Sequences, chunks: Chunks, given: _Given) -> Tensor:
    """Recompute the state at the start of each chunk, [X, G, R, V, K]."""
    states = (given.to_end * given.u).mT @ given.k  # what each chunk adds
    initial = x.initial_state
    S = x.states(len(seqs.slots)).zero_() if initial is None else initial[seqs.slots]
    S = S.unflatten(1, states.shape[1:3])
    for c in chunk_steps(seqs, chunks):
        S_0 = S[: len(c)]
        S = given.whole[c] * S_0 + states[c]
        states[c] = S_0
    return states


def _scan_gradients(
    x: TrainedSsd, seqs: Sequences, chunks: Chunks, given: _Given
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the state at the end of each chunk, and of the initial ones."""
    dstates = (given.since_start * given.dout).mT @ given.q  # by what each chunk reads
    dfinal = x.dfinal_state
    dS = x.states(len(seqs.slots)).zero_() if dfinal is None else dfinal[seqs.slots]
    dS = dS.unflatten(1, dstates.shape[1:3])
    for c in reversed(chunk_steps(seqs, chunks)):
        dS_end = dS[: len(c)].clone()
        dS[: len(c)] = given.whole[c] * dS_end + dstates[c]
        dstates[c] = dS_end
    if x.initial_state is None:
        return dstates, x.states(0)
    dinitial = x.states(x.num_seqs).zero_() if dfinal is None else dfinal.clone()
    dinitial[seqs.slots] = dS.flatten(1, 2)
    return dstates, dinitial


def _inside_chunks(given: _Given, S: Tensor, dS: Tensor) -> tuple[Tensor, ...]:
    """Compute the gradients of scaled q, k, u and g from those of the states."""
    q, k, u, dout = given.q, given.k, given.u, given.dout
    attention = (q @ k.mT) * given.pairs
    dattention = (dout @ u.mT).tril()
    dproducts = (dattention * given.pairs).sum(2, keepdim=True)
    dq_read, dk_write = given.since_start * (dout @ S), given.to_end * (u @ dS)
    dq = dproducts @ k + dq_read.sum(2, keepdim=True)
    dk = dproducts.mT @ q + dk_write.sum(2, keepdim=True)
    du = attention.mT @ dout + given.to_end * (k @ dS.mT)
    # A decay is in all that is read at its row or after it, and in all that is written before it;
    # that of row t lies between all i >= t and j < t.
    between = before_row(from_row_on((dattention * attention).tril(-1)).mT)
    dg = from_row_on((q * dq_read).sum(-1, keepdim=True))
    dg = dg + before_row((k * dk_write).sum(-1, keepdim=True))
    dg = dg + given.whole * (S * dS).sum((-2, -1), keepdim=True)
    return dq, dk, du, dg + between.diagonal(dim1=-2, dim2=-1)[..., None]
