"""cuDNN's attention to packed sequences as torch documents it, without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_hybrid.ops import cudnn_attention


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Rows of sequences are written, no others; the mask counts from each sequence's start."""
    assert attn_bias is None
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert scale is not None
    group = query.shape[1] // key.shape[1]
    out = query.new_full((*query.shape[:2], value.shape[2]), math.nan)
    lse = torch.full((*query.shape[:2], 1), math.nan)
    offsets_q, offsets_k = cum_seq_q.tolist(), cum_seq_k.tolist()
    for n in range(len(offsets_q) - 1):
        rows = slice(offsets_q[n], offsets_q[n + 1])
        keys = slice(offsets_k[n], offsets_k[n + 1])
        assert rows.stop - rows.start <= max_q
        assert keys.stop - keys.start <= max_k
        k, v = (x[keys].float().repeat_interleave(group, 1) for x in (key, value))
        logits = torch.einsum("qhd,khd->hqk", query[rows].float(), k) * scale
        if is_causal:
            later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(later, -math.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v).to(out.dtype)
        lse[rows] = logits.logsumexp(-1).T[..., None]
    nothing = query.new_empty(0)
    return out, lse if compute_log_sumexp else nothing, *[nothing] * 7


@pytest.fixture
def cudnn_by_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations "cudnn" call the oracle."""
    monkeypatch.setattr(cudnn_attention, "forward", forward)
