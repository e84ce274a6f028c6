"""Inputs of the delta rules' decode steps: random tensors for the shape that a case names.

Legend: N sequences, T tokens, C channels of the convolution, W its width, H key heads, HV value
heads, K and V head dims, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tests.ops import step_family
from tests.ops.pages import Lengths, in_slots
from torch_hybrid.ops.delta_rule.op_step_gated import GatedDeltaStep
from torch_hybrid.ops.delta_rule.op_step_kimi import KimiDeltaStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, 0 or 1 each, and the facts of one layer."""

    num_k_heads: int = 2
    num_v_heads: int = 4
    k_dim: int = 16
    v_dim: int = 16
    width: int = 4
    has_bias: bool = False
    activation: str = "silu"
    wide: bool = False  # parameters of the gates and of the norm in float32
    options: tuple[tuple[str, float | None], ...] = ()  # those of one rule alone


@dataclass(slots=True, kw_only=True)
class GatedInputs(step_family.Inputs, GatedDeltaStep):
    """Arguments of a call of the gated delta rule's step."""

    norm_eps: float = 1e-6
    impl: str = ""


@dataclass(slots=True, kw_only=True)
class KimiInputs(step_family.Inputs, KimiDeltaStep):
    """Arguments of a call of Kimi delta attention's step."""

    norm_eps: float = 1e-6
    impl: str = ""


Inputs = GatedInputs | KimiInputs


def random_inputs(case: Case, dtype: torch.dtype, seed: int, *, by_channel: bool) -> Inputs:
    """Random inputs; per-token tensors are slices of one projection, as a model gives them.

    Slots that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=rng)
    v_size = case.num_v_heads * case.v_dim
    channels = 2 * case.num_k_heads * case.k_dim + v_size
    decays = (case.num_v_heads, case.k_dim) if by_channel else (case.num_v_heads,)
    widths = [channels, v_size, case.num_v_heads, torch.Size(decays).numel()]
    qkv, z, b, a = randn(case.num_tokens, sum(widths)).to(dtype).split(widths, 1)
    state = randn(case.num_slots, case.num_v_heads, case.v_dim, case.k_dim)
    conv_state = randn(case.num_slots, case.width - 1, channels).to(dtype)
    slots = in_slots(case.lengths, rng, state, conv_state)
    of_gates = torch.float32 if case.wide else dtype
    return (KimiInputs if by_channel else GatedInputs)(
        qkv=qkv,
        z=z,
        b=b,
        a=a,
        conv_weight=randn(channels, case.width).to(dtype),
        conv_bias=randn(channels).to(dtype) if case.has_bias else None,
        A_log=torch.rand(case.num_v_heads, generator=rng).mul(4).log().to(of_gates),
        dt_bias=(4 * randn(decays)).to(of_gates),
        norm_weight=randn(case.v_dim).to(of_gates),
        conv_state=conv_state,
        state=state,
        **slots,
        activation=case.activation,
        scale=case.k_dim**-0.5,
        **dict(case.options),
    )
