"""Implementation "cpp_invariant": as "cpp", where no query's keys are split."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.block_attention import _cpu

block_attention = partial(_cpu.block_attention, is_invariant=True)
