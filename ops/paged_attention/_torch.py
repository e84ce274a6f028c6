"""Implementation "torch": one sequence at a time, all heads in two batched products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import rounded, worth
from torch_hybrid.ops.paged_attention.op import Pages

# Queries per product: bounds the logits to [Hq, _BLOCK, seq_len].
_BLOCK = 128


def paged_attention_with_lse(x: Pages) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::paged_attention_with_lse``, and the op without."""
    q = x.q
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    _write(x, offsets[-1])
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for n, length in enumerate(lengths):
        for begin in range(offsets[n], offsets[n + 1], _BLOCK):
            rows = slice(begin, min(begin + _BLOCK, offsets[n + 1]))
            position = length - offsets[n + 1] + begin
            first = max(0, position - x.window + 1) if x.window else 0
            keys, values = _gather(x, n, first, position + rows.stop - begin)
            out[rows], lse[rows] = _attend(x, rows, keys, values, position - first)
    return out, lse


def _write(x: Pages, num_tokens: int) -> None:
    slots = x.slot_mapping[:num_tokens].long()
    for plane, new in enumerate((x.k[:num_tokens], x.v[:num_tokens])):
        if x.kv_scales is not None:
            new = rounded(new, x.kv_scales[plane][:, None]).view(torch.uint8)
        rows = x.kv[plane].view(new.dtype).flatten(0, 1)
        rows.index_copy_(0, slots, new)


def _gather(x: Pages, n: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Gather keys and values at positions [first, last) of sequence ``n``, each [Hkv, last - first,
    D]."""
    kv, page_size = x.kv, x.kv.shape[2]
    skipped = first // page_size
    used = x.page_table[n][skipped : -(-last // page_size)].long()
    rows = kv[:, used].flatten(1, 2)[:, first - skipped * page_size : last - skipped * page_size]
    wide = torch.promote_types(x.q.dtype, torch.float32)
    scales = x.kv_scales
    scaled = rows.to(wide) if scales is None else worth(rows, scales[:, None, :, None], wide)
    keys, values = scaled.transpose(1, 2)
    return keys, values


def _attend(
    x: Pages, rows: slice, keys: Tensor, values: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Attend from queries ``rows``, at ``position``, ``position + 1``, ..., to keys from position 0
    on."""
    q, window = x.q[rows], x.window
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    folded = q.to(keys.dtype).view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    logits = x.scale * (folded.flatten(1, 2) @ keys.transpose(1, 2))
    if x.softcap:
        logits = x.softcap * torch.tanh(logits / x.softcap)
    logits = logits.view(num_kv_heads, -1, num_tokens, num_keys)
    query_at = position + torch.arange(num_tokens, dtype=torch.int64, device=q.device)[:, None]
    key_at = torch.arange(num_keys, dtype=torch.int64, device=q.device)
    if x.relative_bias is not None:
        biases = _by_key(x.relative_bias[rows], query_at - key_at).to(logits.dtype)
        logits += biases.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    hidden = key_at > query_at
    if window:
        hidden |= key_at <= query_at - window
    logits.masked_fill_(hidden, -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None])
    out = (weights.flatten(1, 2) @ values).view(num_kv_heads, -1, num_tokens, head_dim)
    return (
        out.permute(2, 0, 1, 3).reshape(num_tokens, num_q_heads, head_dim).to(q.dtype),
        lse.permute(2, 0, 1).reshape(num_tokens, num_q_heads).float(),
    )


def _by_key(relative_bias: Tensor, distance: Tensor) -> Tensor:
    """Pick [T, Hq, keys] of [T, Hq, R] by the ``distance`` [T, keys] of each key."""
    num_tokens, num_heads, reach = relative_bias.shape
    index = distance.clamp(0, reach - 1)[:, None].expand(num_tokens, num_heads, -1)
    is_far = (distance < 0) | (distance >= reach)
    return relative_bias.gather(2, index).masked_fill(is_far[:, None], 0.0)
