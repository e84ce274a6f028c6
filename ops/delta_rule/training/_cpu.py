"""Implementations "cpp" of the backwards, by native/delta_rule_backward.h.

Products of small matrices in chunks, as in the forward. A thread keeps the states of one sequence
and key head, which it recomputes, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_hybrid.ops.core.declare import Op, cpp_launcher
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.delta_rule.training.op import (
    GatedDeltaRuleBackward,
    KimiDeltaAttentionBackward,
)


def _launcher(cls: type[Op], source: str) -> Callable[[Any], tuple[Tensor, ...]]:
    launch = cpp_launcher(
        cls,
        Path(__file__).with_name(source),
        sizes="T=num_tokens num_offsets-1=num_seqs H=num_k_heads HV=num_v_heads K=k_dim V=v_dim",
        values={
            "g_dim": "x.g.shape[2] if x.g.ndim == 3 else 1",
            "chunk_size": str(DEFAULT_CHUNK_SIZE),
        },
        integers="num_tokens num_seqs num_k_heads num_v_heads k_dim v_dim "
        "q_stride k_stride v_stride g_stride beta_stride dout_stride g_dim "
        "qk_l2norm chunk_size is_bf16 num_threads",
        numbers="scale",
        out="dq=q dk=k dv=v dg=g dbeta=beta dinitial_state=initial_state",
    )

    def run(x: Any) -> tuple[Tensor, ...]:
        *grads, dinitial = launch(x)
        return *grads, x.states(0) if dinitial is None else dinitial

    return run


gated_delta_rule_backward = _launcher(GatedDeltaRuleBackward, "_cpu_gated.cpp")
kimi_delta_attention_backward = _launcher(KimiDeltaAttentionBackward, "_cpu_kimi.cpp")
