"""Launchers of the C++ functions of a delta rule (delta_rule.h), the same for every rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_hybrid.ops.core.declare import Op, cpp_launcher


def delta_rule_launcher(cls: type[Op], source: Path, *, is_chunked: bool) -> Callable[[Any], Any]:
    """Make the launcher of one of the functions that TH_EXPORT_DELTA_RULE exports."""
    return cpp_launcher(
        cls,
        source,
        sizes="T=num_tokens N=num_seqs S=num_slots H=num_k_heads K=k_dim V=v_dim",
        values={
            "num_v_heads": "x.v.shape[1]",
            "chunk_size": "x.chunk_size" if is_chunked else "0",
        },
        integers="num_tokens num_seqs num_slots num_k_heads num_v_heads k_dim v_dim "
        "q_stride k_stride v_stride g_stride beta_stride "
        "qk_l2norm chunk_size is_bf16 num_threads",
        numbers="scale",
        out="v",
    )
