"""Both steps in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_lengths
from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.pointwise import sigmoid, silu
from torch_hybrid.ops.ragged_chunks import initial_states, live_sequences, store_states
from torch_hybrid.ops.verify import verify_by_steps


def lightning_step(
    qkv: Tensor,
    gate: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor,
    norm_weight: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """All sequences that have a token together."""
    seqs = live_sequences(
        cu_seqlens,
        initial_indices,
        state_indices,
        num_tokens=qkv.shape[0],
        num_slots=state.shape[0],
    )
    if seqs.max_length > 1:
        check_lengths(cu_seqlens)
    q, k, v = _prepared(
        qkv,
        q_norm_weight,
        k_norm_weight,
        cos,
        sin,
        seqs.starts,
        state.shape[-1],
        activation,
        norm_eps,
    )
    S = initial_states(state, seqs).mul_(torch.exp(-slopes)[:, None, None])
    S.add_(v[..., :, None] * k[..., None, :])
    o = scale * (S @ q[..., None])[..., 0].flatten(1)
    store_states(state, seqs, S)
    o = o if q_norm_weight is not None else o.to(qkv.dtype).float()
    return _finished(o, qkv, gate, norm_weight, seqs.starts, norm_groups, norm_eps)


def lightning_verify(
    qkv: Tensor,
    gate: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor,
    norm_weight: Tensor | None,
    state: Tensor,
    *index_and_records: Tensor,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """A token of all sequences at a time."""
    cu_seqlens, initial_indices, state_indices, records, accepted = index_and_records
    if qkv.device.type == "cpu":  # before the offsets say which tokens there are
        index = (cu_seqlens, initial_indices, state_indices)
        check_state_indices(*index, num_tokens=qkv.shape[0], num_slots=state.shape[0])
    token = torch.arange(int(cu_seqlens[-1]), dtype=torch.int64, device=qkv.device)
    q, k, v = _prepared(
        qkv, q_norm_weight, k_norm_weight, cos, sin, token, state.shape[-1], activation, norm_eps
    )
    decay = torch.exp(-slopes)[:, None, None]

    def advance(
        rows: Tensor, token: Tensor | None, pools: Sequence[Tensor], offsets: Tensor, own: Tensor
    ) -> Tensor:
        slots = own[offsets.diff() > 0].long()
        own_k, own_v = rows.unflatten(1, (2, *k.shape[1:])).unbind(1)
        S = pools[0][slots].mul_(decay).add_(own_v[..., :, None] * own_k[..., None, :])
        pools[0][slots] = S
        return rows if token is None else scale * (S @ q[token][..., None])[..., 0].flatten(1)

    o = verify_by_steps(
        advance,
        torch.cat([k, v], 1).flatten(1),
        q.new_zeros(len(q), q.shape[1] * q.shape[2]),
        [state],
        records,
        accepted,
        cu_seqlens,
        initial_indices,
        state_indices,
    )
    o = o if q_norm_weight is not None else o.to(qkv.dtype).float()
    return _finished(o, qkv, gate, norm_weight, token, norm_groups, norm_eps)


def _prepared(
    qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    token: Tensor,
    dim: int,
    activation: str,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [T, H, D] of some tokens as the recurrence takes them, without q's scale."""
    x = qkv[token]
    x = silu(x.float()).to(x.dtype) if activation == "silu" else x
    q, k, v = x.float().unflatten(1, (3, -1, dim)).unbind(1)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = _norm(q, q_norm_weight, norm_eps), _norm(k, k_norm_weight, norm_eps)
    if cos is not None and sin is not None:
        angles = cos[token, None], sin[token, None]
        q, k = _rotate(q, *angles), _rotate(k, *angles)
    return q, k, v


def _finished(
    o: Tensor,
    qkv: Tensor,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    token: Tensor,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """What was read for some tokens, normed and gated, in the places of all."""
    dtype = torch.float32
    if gate is not None and norm_weight is not None:
        groups = norm_weight.unflatten(0, (norm_groups, -1))
        o = _norm(o.unflatten(1, (norm_groups, -1)), groups, norm_eps).flatten(1)
        o, dtype = o * sigmoid(gate[token].float()), qkv.dtype
    out = qkv.new_zeros(qkv.shape[0], o.shape[1], dtype=dtype)
    out[token] = o.to(dtype)
    return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.float() * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
