"""Backward of the delta rules in vectorised torch, derived from the chunk form.

What a chunk knows without its state is computed for all chunks at once. Two scans follow: states
forwards, as the forward had them, and their gradients backwards. Products over all chunks at once
then give the gradients of inputs. X chunks, HV heads, C rows; the decay has K channels or one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.delta_rule._torch import sum_after
from torch_hybrid.ops.delta_rule.training._torch_pairs import (
    PairsByChannel,
    PairsByHead,
)
from torch_hybrid.ops.delta_rule.training.op import TrainedDeltaRule
from torch_hybrid.ops.delta_rule.unit_rows import gradient_before, inverse_length, l2_normalize
from torch_hybrid.ops.ragged_chunks import (
    Chunks,
    Sequences,
    before_row,
    chunk_steps,
    chunk_table,
    from_row_on,
    packed_sequences,
    scatter_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """Inputs of all chunks, and what follows from them without a state.

    ``q_rows`` and ``k_rows`` [X, H, C, K] are as they came; q and k [X, HV, C, K] are normalised,
    scaled, and those of each value head.
    """

    q_rows: Tensor
    k_rows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    beta: Tensor  # [X, HV, C, 1]; 0 past the end of a sequence
    g: Tensor  # [X, HV, C, K or 1]; 0 there
    since_start: Tensor  # decay from the start of the chunk to each row, like g
    to_end: Tensor  # decay from each row to the end
    whole: Tensor  # [X, HV, 1, K or 1]
    pairs: PairsByChannel | PairsByHead
    u: Tensor
    w: Tensor


@without_autocast
def delta_rule_backward(x: TrainedDeltaRule) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, g, beta and the initial state."""
    seqs = packed_sequences(x)
    chunks = chunk_table(seqs, DEFAULT_CHUNK_SIZE)
    given = _gather(x, chunks)
    S, v_new = _scan_states(x, seqs, chunks, given)
    dS, dv_new, dinitial = _scan_gradients(x, seqs, chunks, given)
    dq, dk, dv, dg, dbeta = _inside_chunks(given, S, v_new, dS, dv_new)
    dq = _of_rows(dq, given.q_rows, x.scale, normalized=x.qk_l2norm)
    dk = _of_rows(dk, given.k_rows, 1.0, normalized=x.qk_l2norm)
    grads = zip((dq, dk, dv, dg, dbeta), (x.q, x.k, x.v, x.g, x.beta), strict=True)
    return *(scatter_rows(grad, like, chunks) for grad, like in grads), dinitial


def _gather(x: TrainedDeltaRule, chunks: Chunks) -> _Given:
    """Gather the rows of all chunks, and solve their systems."""
    is_real, group = chunks.is_real[:, None, :, None], x.v.shape[1] // x.k.shape[1]

    def rows(tensor: Tensor) -> Tensor:
        return tensor[chunks.token].to(x.work).transpose(1, 2)

    q_rows, k_rows, v = rows(x.q), rows(x.k), rows(x.v)
    g, beta, dout = (
        torch.where(is_real, rows(each), 0.0)
        for each in (x.g if x.g.ndim == 3 else x.g[..., None], x.beta[..., None], x.dout)
    )
    q, k = q_rows, k_rows
    if x.qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    q, k = (q * x.scale).repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    pairs = (PairsByChannel if x.g.ndim == 3 else PairsByHead)(q, k, g)
    since_start = g.cumsum(-2).exp()
    system = beta * pairs.kk
    u, w = (
        torch.linalg.solve_triangular(system, beta * each, upper=False, unitriangular=True)
        for each in (v, k * since_start)
    )
    return _Given(
        q_rows=q_rows,
        k_rows=k_rows,
        q=q,
        k=k,
        v=v,
        dout=dout,
        beta=beta,
        g=g,
        since_start=since_start,
        to_end=sum_after(g).exp(),
        whole=since_start[..., -1:, :],
        pairs=pairs,
        u=u,
        w=w,
    )


def _scan_states(
    x: TrainedDeltaRule, seqs: Sequences, chunks: Chunks, given: _Given
) -> tuple[Tensor, Tensor]:
    """Recompute the state at the start of each chunk, and what each row adds to it."""
    states = given.u.new_empty(len(chunks.token), *x.states(0).shape[1:])
    v_new, writes = torch.empty_like(given.u), given.k * given.to_end
    initial = x.initial_state
    S = x.states(len(seqs.slots)).zero_() if initial is None else initial[seqs.slots]
    for c in chunk_steps(seqs, chunks):
        states[c] = S_0 = S[: len(c)]
        v_new[c] = added = given.u[c] - given.w[c] @ S_0.mT
        S = S_0 * given.whole[c] + added.mT @ writes[c]
    return states, v_new


def _scan_gradients(
    x: TrainedDeltaRule, seqs: Sequences, chunks: Chunks, given: _Given
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the state at the end of each chunk, of v_new, and of the first."""
    dv_new = given.pairs.qk.mT @ given.dout
    reads = given.dout.mT @ (given.q * given.since_start)
    dstates, writes = torch.empty_like(reads), given.k * given.to_end
    dfinal = x.dfinal_state
    dS = x.states(len(seqs.slots)).zero_() if dfinal is None else dfinal[seqs.slots]
    for c in reversed(chunk_steps(seqs, chunks)):
        n = len(c)
        dstates[c] = dS_end = dS[:n]
        dv_new[c] = dadded = dv_new[c] + writes[c] @ dS_end.mT
        dS[:n] = reads[c] + given.whole[c] * dS_end - dadded.mT @ given.w[c]
    if x.initial_state is None:
        return dstates, dv_new, x.states(0)
    dinitial = x.states(x.num_seqs).zero_() if dfinal is None else dfinal.clone()
    dinitial[seqs.slots] = dS
    return dstates, dv_new, dinitial


def _inside_chunks(
    given: _Given, S: Tensor, v_new: Tensor, dS: Tensor, dv_new: Tensor
) -> Iterator[Tensor]:
    """Compute the gradients of q, k, v, g and beta, [X, HV, C, .], from those of the states."""
    q, k, beta, E, F = given.q, given.k, given.beta, given.since_start, given.to_end
    dx = torch.linalg.solve_triangular(
        (beta * given.pairs.kk).mT, dv_new, upper=True, unitriangular=True
    )
    dsystem = -(dx @ v_new.mT).tril(-1)
    error = given.v - k * E @ S.mT
    dv = beta * dx
    dk_read, dq_read, dk_write = -dv @ S, given.dout @ S, v_new @ dS
    pairs = given.pairs.gradients(beta * dsystem, (given.dout @ v_new.mT).tril())
    yield E * dq_read + pairs.q
    yield E * dk_read + F * dk_write + pairs.k
    yield dv
    # A decay is in all that is read after it, and in all that is written before it.
    reads = E * (k * dk_read + q * dq_read)
    writes = F * k * dk_write
    whole = given.whole * (S * dS).sum(-2, keepdim=True)
    if given.g.shape[-1] == 1:
        reads, writes, whole = (each.sum(-1, keepdim=True) for each in (reads, writes, whole))
    yield from_row_on(reads) + before_row(writes) + whole + pairs.g
    yield (dx * error).sum(-1, keepdim=True) + (dsystem * given.pairs.kk).sum(-1, keepdim=True)


def _of_rows(grad: Tensor, rows: Tensor, scale: float, *, normalized: bool) -> Tensor:
    """Carry a gradient of value heads [X, HV, C, K] back to rows [X, H, C, K] as they came."""
    grad = scale * grad.unflatten(1, (rows.shape[1], -1)).sum(2)
    if not normalized:
        return grad
    inverse = inverse_length(rows)
    return gradient_before(grad, rows * inverse, inverse)
