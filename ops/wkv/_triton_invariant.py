"""Implementation "triton_invariant": a token alone as among others, in a walk of its sequence."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.wkv import _triton

wkv = partial(_triton.wkv, is_invariant=True)
