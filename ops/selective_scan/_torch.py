"""Both execution forms in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.pointwise import silu, softplus
from torch_hybrid.ops.ragged_chunks import (
    chunk_table,
    initial_states,
    sequences_of,
    store_states,
)
from torch_hybrid.ops.selective_scan.op import SelectiveScan


def recurrent_selective_scan(given: SelectiveScan) -> Tensor:
    """Step all sequences together, the longest first, so that those left are a leading slice."""
    x, z, B, C, work = given.x, given.z, given.B, given.C, given.state.dtype
    seqs = sequences_of(given)
    S, A, D = initial_states(given.state, seqs), -given.A_log.to(work).exp(), given.D.to(work)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for i in range(seqs.max_length):
        num_left = int((seqs.lengths > i).sum())
        token = seqs.starts[:num_left] + i
        x_t, step = x[token].to(work), _steps(given, token)
        _advance(S[:num_left], x_t, step, _of_channels(B, token, given), A)
        y = _read(S[:num_left], _of_channels(C, token, given)) + D * x_t
        out[token] = (y if z is None else y * silu(z[token].to(work))).to(out.dtype)
    store_states(given.state, seqs, S)
    return out


def chunk_selective_scan(given: SelectiveScan) -> Tensor:
    """Walk all chunks side by side from zero states; then the states from chunk to chunk; then all
    chunks again for what those have in their outputs."""
    x, z, B, C, work = given.x, given.z, given.B, given.C, given.state.dtype
    seqs = sequences_of(given)
    S, A, D = initial_states(given.state, seqs), -given.A_log.to(work).exp(), given.D.to(work)
    chunk_size = given.chunk_size
    chunks = chunk_table(seqs, chunk_size)
    # Rows past the end of a sequence have steps of 0: they change no state.
    steps = _steps(given, chunks.token) * chunks.is_real[..., None]

    def read(states: Tensor, i: int) -> Tensor:
        return _read(states, _of_channels(C, chunks.token[:, i], given))

    x_c = x[chunks.token].to(work)
    y = D * x_c
    own = x_c.new_zeros(len(chunks.token), *S.shape[1:])
    for i in range(chunk_size):
        _advance(own, x_c[:, i], steps[:, i], _of_channels(B, chunks.token[:, i], given), A)
        y[:, i] += read(own, i)

    since_start = steps.cumsum(1)
    starts = torch.empty_like(own)
    for chunk in range(-(-seqs.max_length // chunk_size)):
        num_left = int((seqs.lengths > chunk * chunk_size).sum())
        c = chunks.first[:num_left] + chunk
        starts[c] = S[:num_left]
        S[:num_left].mul_((since_start[c, -1][..., None] * A).exp()).add_(own[c])
    for i in range(chunk_size):
        y[:, i] += read(starts * (since_start[:, i][..., None] * A).exp(), i)
    store_states(given.state, seqs, S)

    if z is not None:
        y *= silu(z[chunks.token].to(work))
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out[chunks.token[chunks.is_real]] = y[chunks.is_real].to(out.dtype)
    return out


def _steps(given: SelectiveScan, token: Tensor) -> Tensor:
    """Compute the step sizes of some tokens."""
    dt = given.dt[token].to(given.state.dtype)
    return softplus(dt if given.dt_bias is None else dt + given.dt_bias.to(dt.dtype))


def _of_channels(rows: Tensor, token: Tensor, given: SelectiveScan) -> Tensor:
    """Take rows [T, G, N] of some tokens, each group's repeated for its channels."""
    of_group = given.x.shape[1] // rows.shape[1]
    return rows[token].to(given.state.dtype).repeat_interleave(of_group, 1)


def _advance(S: Tensor, x: Tensor, step: Tensor, B: Tensor, A: Tensor) -> None:
    """Advance each of the states S [M, channels, N] by one token, in place."""
    S.mul_((step[..., None] * A).exp()).addcmul_((step * x)[..., None], B)


def _read(S: Tensor, C: Tensor) -> Tensor:
    return (S * C).sum(-1)
