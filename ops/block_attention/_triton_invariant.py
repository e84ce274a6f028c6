"""Implementation "triton_invariant": each query's keys in one walk, by programs of its own."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.block_attention import _triton

block_attention = partial(_triton.block_attention, is_invariant=True)
