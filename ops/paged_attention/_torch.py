"""Implementation "torch": one sequence at a time, all heads in two batched products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.core.page_bounds import check_page_indices
from torch_hybrid.ops.formats.fp8_kv import rounded, worth

# Queries per product: bounds the logits to [Hq, _BLOCK, seq_len].
_BLOCK = 128


def paged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::paged_attention_with_lse``, and of the op without."""
    if q.device.type == "cpu":
        check_page_indices(
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=kv.shape[1],
            page_size=kv.shape[2],
            window=window,
        )
    offsets, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    _write(k, v, kv, slot_mapping, offsets[-1], kv_scales)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for n, length in enumerate(lengths):
        for begin in range(offsets[n], offsets[n + 1], _BLOCK):
            end = min(begin + _BLOCK, offsets[n + 1])
            position = length - offsets[n + 1] + begin
            first = max(0, position - window + 1) if window else 0
            keys, values = _gather(
                kv, page_table[n], first, position + end - begin, q.dtype, kv_scales
            )
            bias = None if relative_bias is None else relative_bias[begin:end]
            out[begin:end], lse[begin:end] = _attend(
                q[begin:end], keys, values, position - first, scale, window, softcap, bias
            )
    return out, lse


def _write(
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    num_tokens: int,
    kv_scales: Tensor | None,
) -> None:
    slots = slot_mapping[:num_tokens].long()
    for plane, new in enumerate((k[:num_tokens], v[:num_tokens])):
        if kv_scales is not None:
            new = rounded(new, kv_scales[plane][:, None]).view(torch.uint8)
        rows = kv[plane].view(new.dtype).flatten(0, 1)
        rows.index_copy_(0, slots, new)


def _gather(
    kv: Tensor,
    pages: Tensor,
    first: int,
    last: int,
    dtype: torch.dtype,
    kv_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Keys and values at positions [first, last) of one sequence, each [Hkv, last - first, D],
    for queries of ``dtype``."""
    page_size = kv.shape[2]
    skipped = first // page_size
    used = pages[skipped : -(-last // page_size)].long()
    rows = kv[:, used].flatten(1, 2)[:, first - skipped * page_size : last - skipped * page_size]
    wide = torch.promote_types(dtype, torch.float32)
    scaled = rows.to(wide) if kv_scales is None else worth(rows, kv_scales[:, None, :, None], wide)
    keys, values = scaled.transpose(1, 2)
    return keys, values


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scale: float,
    window: int,
    softcap: float,
    relative_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries at ``position``, ``position + 1``, ... to keys from position 0 on."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    folded = q.to(keys.dtype).view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    logits = scale * (folded.flatten(1, 2) @ keys.transpose(1, 2))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.view(num_kv_heads, -1, num_tokens, num_keys)
    query_at = position + torch.arange(num_tokens, dtype=torch.int64, device=q.device)[:, None]
    key_at = torch.arange(num_keys, dtype=torch.int64, device=q.device)
    if relative_bias is not None:
        biases = _by_key(relative_bias, query_at - key_at).to(logits.dtype)
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
    """[T, Hq, keys] of [T, Hq, R] by the ``distance`` [T, keys] of each key."""
    num_tokens, num_heads, reach = relative_bias.shape
    index = distance.clamp(0, reach - 1)[:, None].expand(num_tokens, num_heads, -1)
    is_far = (distance < 0) | (distance >= reach)
    return relative_bias.gather(2, index).masked_fill(is_far[:, None], 0.0)
