"""Implementation "triton_invariant": one query as several, in tiles of one size."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.select_blocks import _triton

select_blocks = partial(_triton.select_blocks, is_invariant=True)
