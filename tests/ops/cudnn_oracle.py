"""cuDNN's attention as torch documents it, without a GPU."""

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
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """[B, H, L, D]; heads or tokens are outermost in the result as they are in the query."""
    assert attn_bias is None
    assert dropout_p == 0.0
    assert is_causal
    assert not return_debug_mask
    assert scale is not None
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (key, value))
    logits = torch.einsum("bhqd,bhkd->bhqk", query.float(), k) * scale
    later = torch.ones(logits.shape[2:], dtype=torch.bool).triu(1)
    logits = logits.masked_fill(later, -math.inf)
    out = torch.einsum("bhqk,bhkd->bhqd", logits.softmax(-1), v).to(query.dtype).contiguous()
    if query.stride(2) > query.stride(1):
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = logits.logsumexp(-1, keepdim=True)
    nothing = query.new_empty(0)
    return out, lse if compute_log_sumexp else nothing, *[nothing] * 7


@pytest.fixture
def cudnn_by_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations "cudnn" call the oracle."""
    monkeypatch.setattr(cudnn_attention, "forward", forward)
