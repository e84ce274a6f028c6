"""Inputs of the Mamba2 mixer's decode step: shapes of real models, and odd small ones.

Legend: N sequences, T tokens, C channels of the convolution, W its width, G groups of B and C,
H heads, K and V head dims, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tests.ops import step_family
from tests.ops.pages import Lengths, in_slots
from tests.ops.step_family import Family
from torch_hybrid.ops.ssd import ssd_step
from torch_hybrid.ops.ssd.op_step_mamba2 import IMPLEMENTATIONS, SsdStep
from torch_hybrid.ops.ssd.reference_step_mamba2 import ssd_step_reference

GATES = ("before_norm", "after_norm", "no_norm", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, 0 or 1 each, and the facts of one layer."""

    num_groups: int = 2
    num_heads: int = 4
    k_dim: int = 16
    v_dim: int = 16
    width: int = 4
    has_bias: bool = True
    activation: str = "silu"
    gate: str = "before_norm"  # one of GATES; "none": the op is given no gate
    norm_groups: int = 2
    dt_min: float = 0.0
    dt_max: float = float("inf")
    wide: bool = False  # parameters of the heads and of the norm in float32


@dataclass(slots=True, kw_only=True)
class Inputs(step_family.Inputs, SsdStep):
    """Arguments of a call."""

    norm_eps: float = 1e-5
    impl: str = ""


CASES = {
    "one_token": Case(lengths=(1,), num_groups=1, num_heads=1, norm_groups=1),
    "mixed": Case(lengths=(1, 0, 1, 1, 1, 0, 1), num_padding_tokens=3),
    "norm_before_gate": Case(lengths=(1, 1), num_heads=6, k_dim=48, width=3, gate="after_norm"),
    "odd_dims": Case(
        lengths=(1, 1, 1),
        num_groups=3,
        num_heads=3,
        k_dim=19,
        v_dim=27,
        norm_groups=1,
        activation="none",
        has_bias=False,
    ),
    "bounded_steps": Case(lengths=(1, 1), gate="no_norm", dt_min=0.3, dt_max=1.2, v_dim=40),
    "ungated": Case(lengths=(1, 1), gate="none", width=8, k_dim=64, wide=True),
    # A group of each norm is no whole number of heads.
    "wide_parameters": Case(lengths=(1, 1), num_heads=6, norm_groups=4, wide=True),
    "nemotron_h": Case(lengths=(1,) * 9, num_groups=2, k_dim=128, v_dim=64),
    "falcon_h1": Case(
        lengths=(1, 1), num_groups=1, num_heads=3, k_dim=256, v_dim=64, gate="no_norm"
    ),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs; per-token tensors are slices of one projection, as a model gives them.

    Slots that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=rng)
    inner = case.num_heads * case.v_dim
    channels = inner + 2 * case.num_groups * case.k_dim
    z, xBC, dt = (
        randn(case.num_tokens, inner + channels + case.num_heads)
        .to(dtype)
        .split([inner, channels, case.num_heads], 1)
    )
    state = randn(case.num_slots, case.num_heads, case.v_dim, case.k_dim)
    conv_state = randn(case.num_slots, case.width - 1, channels).to(dtype)
    slots = in_slots(case.lengths, rng, state, conv_state)
    of_heads = torch.float32 if case.wide else dtype
    has_norm = case.gate in ("before_norm", "after_norm")
    return Inputs(
        xBC=xBC,
        z=None if case.gate == "none" else z,
        dt=dt,
        conv_weight=randn(channels, case.width).to(dtype),
        conv_bias=randn(channels).to(dtype) if case.has_bias else None,
        A_log=torch.rand(case.num_heads, generator=rng).mul(4).log().to(of_heads),
        dt_bias=(4 * randn(case.num_heads)).to(of_heads),
        D=randn(case.num_heads).to(of_heads),
        norm_weight=randn(inner).to(of_heads) if has_norm else None,
        conv_state=conv_state,
        state=state,
        **slots,
        activation=case.activation,
        dt_min=case.dt_min,
        dt_max=case.dt_max,
        norm_before_gate=case.gate == "after_norm",
        norm_groups=case.norm_groups,
    )


FAMILY = Family(
    op=ssd_step,
    implementations=IMPLEMENTATIONS,
    reference=ssd_step_reference,
    cases=CASES,
    make_inputs=make_inputs,
)
