"""Both execution forms as C++ kernels: see _cpu_kimi.cpp, and delta_rule.h in ops/native."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from torch_hybrid.ops.native.delta_rule import delta_rule_kernel, run_delta_rule

_SOURCE = Path(__file__).with_name("_cpu_kimi.cpp")
_RECURRENT = delta_rule_kernel("recurrent_kimi_delta_attention", _SOURCE)
_CHUNK = delta_rule_kernel("chunk_kimi_delta_attention", _SOURCE)


def recurrent_kimi_delta_attention(*tensors: Tensor, scale: float, qk_l2norm: bool) -> Tensor:
    """Walk token by token: each head's state is read once and written once per token."""
    return run_delta_rule(_RECURRENT, *tensors, scale=scale, qk_l2norm=qk_l2norm)


def chunk_kimi_delta_attention(
    *tensors: Tensor, scale: float, qk_l2norm: bool, chunk_size: int
) -> Tensor:
    """Walk chunk by chunk with products of small matrices; a few tokens go the recurrent way."""
    return run_delta_rule(_CHUNK, *tensors, scale=scale, qk_l2norm=qk_l2norm, chunk_size=chunk_size)
