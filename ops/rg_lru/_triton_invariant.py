"""Implementation "triton_invariant": a token alone as among others, in a walk of its sequence."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.rg_lru import _triton

rg_lru = partial(_triton.rg_lru, is_invariant=True)
