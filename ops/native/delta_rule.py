"""Launchers of the C++ function of a delta rule (delta_rule.h), the same for every rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch_hybrid.ops.core.declare import Op, cpp_launcher


def delta_rule_launchers(cls: type[Op], source: Path) -> Iterator[Callable[[Any], Any]]:
    """Make the launchers of what TH_EXPORT_DELTA_RULE exports: by token, and by chunk."""
    for chunk_size in ("0", "x.chunk_size"):
        yield cpp_launcher(
            cls,
            source,
            sizes="T=num_tokens N=num_seqs S=num_slots H=num_k_heads K=k_dim V=v_dim",
            values={"num_v_heads": "x.v.shape[1]", "chunk_size": chunk_size},
            integers="num_tokens num_seqs num_slots num_k_heads num_v_heads k_dim v_dim "
            "q_stride k_stride v_stride g_stride beta_stride "
            "qk_l2norm chunk_size is_bf16 num_threads",
            numbers="scale",
            out="v",
        )
