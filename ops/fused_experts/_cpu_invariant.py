"""Implementation "cpp_invariant": however few tokens an expert has by the product of many."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.fused_experts import _cpu

# A token has the bits that it has alone.
fused_experts = partial(_cpu.fused_experts, is_invariant=True)
