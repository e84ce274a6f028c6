"""Inputs of the delta rules: random tensors for the lengths and shape that a case names.

Legend: N sequences, T tokens, H key heads, HV value heads, K and V head dims, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.declared import RecurrentInputs
from tests.ops.pages import Lengths, in_slots
from torch_hybrid.ops.delta_rule.op import GatedDeltaRule, KimiDeltaAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, and the shape of one layer."""

    num_k_heads: int = 2
    num_v_heads: int = 4
    k_dim: int = 16
    v_dim: int = 16


@dataclass(slots=True, kw_only=True)
class GatedInputs(RecurrentInputs, GatedDeltaRule):
    """Arguments of a call of the gated delta rule."""

    qk_l2norm: bool = True
    impl: str = ""


@dataclass(slots=True, kw_only=True)
class KimiInputs(RecurrentInputs, KimiDeltaAttention):
    """Arguments of a call of Kimi delta attention."""

    qk_l2norm: bool = True
    impl: str = ""


Inputs = GatedInputs | KimiInputs


def random_inputs(case: Case, dtype: torch.dtype, seed: int, *, channels: bool) -> Inputs:
    """Random inputs with decays of 1 to 1000 tokens, and now and then one that forgets all.

    q, k and v are slices of one tensor, as a model's projection gives them. Slots that no
    sequence starts from hold NaN: those of new sequences, and the null slot. With ``channels``
    each channel of K has a decay of its own.
    """
    rng = torch.Generator().manual_seed(seed)
    k_size, v_size = case.num_k_heads * case.k_dim, case.num_v_heads * case.v_dim
    qkv = torch.randn(case.num_tokens, 2 * k_size + v_size, generator=rng).to(dtype)
    q, k, v = qkv.split([k_size, k_size, v_size], dim=1)
    decays = (case.num_tokens, case.num_v_heads, *([case.k_dim] if channels else []))
    g = -1 / 10 ** (3 * torch.rand(decays, generator=rng))
    g[torch.rand(case.num_tokens, generator=rng) < 0.03] = -20.0
    g[torch.rand(decays, generator=rng) < 0.03] = -20.0
    state = torch.randn(case.num_slots, case.num_v_heads, case.v_dim, case.k_dim, generator=rng)
    slots = in_slots(case.lengths, rng, state)
    return (KimiInputs if channels else GatedInputs)(
        q=q.unflatten(1, (case.num_k_heads, case.k_dim)),
        k=k.unflatten(1, (case.num_k_heads, case.k_dim)),
        v=v.unflatten(1, (case.num_v_heads, case.v_dim)),
        g=g,
        beta=torch.rand(case.num_tokens, case.num_v_heads, generator=rng),
        state=state,
        **slots,
        scale=case.k_dim**-0.5,
    )
