"""Implementation "triton_invariant": a token alone as among others, all of its keys in one walk."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.latent_attention import _triton

latent_attention_with_lse = partial(_triton.latent_attention_with_lse, is_invariant=True)
