"""Implementation "cpp_invariant": as "cpp", with keys cut where they are in any call."""

from __future__ import annotations

from functools import partial

from torch_hybrid.ops.latent_attention import _cpu

# A token has the bits that it has alone: its keys are split at multiples of 1024.
latent_attention_with_lse = partial(_cpu.latent_attention_with_lse, is_invariant=True)
