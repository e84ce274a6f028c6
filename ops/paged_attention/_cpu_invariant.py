"""Implementation "cpp_invariant": the tiles of _cpu.cpp for any number of tokens."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.paged_attention import _cpu

# A token has the bits that it has alone: keys are met in blocks of 64 from the sequence's first on,
# one after the other, and no sequence is split.
paged_attention_with_lse = partial(_cpu.paged_attention_with_lse, is_invariant=True)
