"""Implementation "torch": for machines without a compiler, and as a baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_lengths
from torch_hybrid.ops.core.declare import StatefulOp
from torch_hybrid.ops.pointwise import sigmoid, silu
from torch_hybrid.ops.ragged_chunks import initial_states, sequences_of, store_states
from torch_hybrid.ops.ssd.op_step_lightning import LightningStep, empty_outputs
from torch_hybrid.ops.verify import verify_by_steps


def lightning_step(x: LightningStep) -> Tensor:
    """Launch ``torch_hybrid::lightning_step``: a token of all sequences at a time."""
    if x.records is not None:
        return _verify(x)
    seqs = sequences_of(x)
    if seqs.max_length > 1:
        check_lengths(x.cu_seqlens)
    q, k, v = _prepared(x, seqs.starts)
    S = initial_states(x.state, seqs).mul_(torch.exp(-x.slopes)[:, None, None])
    S.add_(v[..., :, None] * k[..., None, :])
    o = x.scale * (S @ q[..., None])[..., 0].flatten(1)
    store_states(x.state, seqs, S)
    return _finished(x, o, seqs.starts)


def _verify(x: LightningStep) -> Tensor:
    """Prepare all tokens, and verify drafts by steps of the recurrence."""
    if x.qkv.device.type == "cpu":  # before the offsets say which tokens there are
        StatefulOp.check_indices(x)
    token = torch.arange(int(x.cu_seqlens[-1]), dtype=torch.int64, device=x.qkv.device)
    q, k, v = _prepared(x, token)
    decay = torch.exp(-x.slopes)[:, None, None]

    def advance(
        rows: Tensor, token: Tensor | None, pools: Sequence[Tensor], offsets: Tensor, own: Tensor
    ) -> Tensor:
        slots = own[offsets.diff() > 0].long()
        own_k, own_v = rows.unflatten(1, (2, *k.shape[1:])).unbind(1)
        S = pools[0][slots].mul_(decay).add_(own_v[..., :, None] * own_k[..., None, :])
        pools[0][slots] = S
        return rows if token is None else x.scale * (S @ q[token][..., None])[..., 0].flatten(1)

    rows, out = torch.cat([k, v], 1).flatten(1), q.new_zeros(len(q), x.width)
    o = verify_by_steps(advance, x, rows, out, [x.state])
    return _finished(x, o, token)


def _prepared(x: LightningStep, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make q, k and v [T, H, D] of some tokens as the recurrence takes them, q not scaled."""
    rows = x.qkv[token]
    rows = silu(rows.float()).to(rows.dtype) if x.activation == "silu" else rows
    q, k, v = rows.float().unflatten(1, (3, -1, x.state.shape[-1])).unbind(1)
    if x.q_norm_weight is not None and x.k_norm_weight is not None:
        q, k = _norm(q, x.q_norm_weight, x.norm_eps), _norm(k, x.k_norm_weight, x.norm_eps)
    if x.cos is not None and x.sin is not None:
        angles = x.cos[token, None], x.sin[token, None]
        q, k = _rotate(q, *angles), _rotate(k, *angles)
    return q, k, v


def _finished(x: LightningStep, o: Tensor, token: Tensor) -> Tensor:
    """Apply the norm and the gate to what was read for some tokens, in the places of all."""
    o = o if x.q_norm_weight is not None else o.to(x.qkv.dtype).float()
    if x.gate is not None and x.norm_weight is not None:
        groups = x.norm_weight.unflatten(0, (x.norm_groups, -1))
        o = _norm(o.unflatten(1, (x.norm_groups, -1)), groups, x.norm_eps).flatten(1)
        o = o * sigmoid(x.gate[token].float())
    out = empty_outputs(x).zero_()
    out[token] = o.to(out.dtype)
    return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.float() * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
