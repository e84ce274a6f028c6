"""Implementations that plan, of nothing but torch: every launch looks whether it was given what
was planned for its own lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import Capability, Implementation
from torch_hybrid.ops.core.planning import Lengths, Planned
from torch_hybrid.ops.delta_rule import _torch as _delta
from torch_hybrid.ops.delta_rule.op import DeltaRule
from torch_hybrid.ops.paged_attention import _torch
from torch_hybrid.ops.paged_attention.op import FEATURES, PagedAttention
from torch_hybrid.ops.ragged_attention import _torch as _ragged
from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse

LAUNCHED: list[tuple[int, ...]] = []  # the values that each launch was given
PLANNING = Implementation(
    capability=Capability(devices=frozenset({"cpu"}), features=FEATURES, cuda_graph=True),
    launcher=f"{__name__}:paged_attention",
    planner=f"{__name__}:plan",
)


def plan(lengths: Lengths, *, num_q_heads: int, device: torch.device, **_: Any) -> Planned:
    """The lengths doubled, and on the host how long the longest is."""
    assert device.type == "cpu"
    return Planned(
        tensors=(2 * lengths.seq_lens, lengths.cu_seqlens[-1:] + lengths.num_tokens),
        values=(int(lengths.seq_lens.max()), num_q_heads),
    )


def paged_attention(x: PagedAttention) -> Tensor:
    """As implementation "torch", where all that was planned is of this step."""
    doubled, tokens, values = x.planned or ()
    assert torch.equal(doubled, 2 * x.seq_lens)
    assert int(tokens) == int(x.cu_seqlens[-1]) + len(x.q)
    assert values.tolist() == [int(x.seq_lens.max()), x.q.shape[1]]
    LAUNCHED.append(tuple(values.tolist()))
    return _torch.paged_attention_with_lse(x)[0]


EXPANDED = Implementation(
    capability=Capability(devices=frozenset({"cpu"}), cuda_graph=True),
    launcher=f"{__name__}:ragged_attention_with_lse",
    planner=f"{__name__}:plan_keys",
)


def plan_keys(lengths: Lengths, **_: Any) -> Planned:
    """Whether every sequence has as many keys as queries."""
    no_prefix = torch.equal(lengths.cu_seqlens.diff(), lengths.seq_lens)
    return Planned(tensors=(), values=(int(no_prefix),))


def ragged_attention_with_lse(x: RaggedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """As implementation "torch", where a causal call was planned with its own keys."""
    (values,) = x.planned or ()
    if x.causal:
        assert values.tolist() == [int(torch.equal(x.cu_seqlens_q, x.cu_seqlens_k))]
        LAUNCHED.append(tuple(values.tolist()))
    return _ragged.ragged_attention_with_lse(x)


CHUNK_RULE = Implementation(
    capability=Capability(devices=frozenset({"cpu"}), cuda_graph=True),
    launcher=f"{__name__}:chunk_delta_rule",
    planner=f"{__name__}:plan_rule",
)


def plan_rule(
    lengths: Lengths, *, num_v_heads: int, head_v_dim: int, dtype: torch.dtype, **_: Any
) -> Planned:
    """How long the longest is, and what is known of the layers."""
    assert dtype.is_floating_point
    longest = int(lengths.cu_seqlens.diff().max())
    return Planned(tensors=(), values=(longest, num_v_heads, head_v_dim))


def chunk_delta_rule(x: DeltaRule) -> Tensor:
    """As implementation "torch", where all that was planned is of this step and layer."""
    assert x.planned is not None
    (values,) = x.planned
    assert values.tolist() == [int(x.cu_seqlens.diff().max()), *x.v.shape[1:]]
    LAUNCHED.append(tuple(values.tolist()))
    return _delta.chunk_delta_rule(x)
