"""Inputs of the lightning mixer's decode step: shapes of real models, and odd small ones.

Legend: N sequences, T tokens, H heads, D their dim, R channels of a head that are rotated, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tests.ops import step_family
from tests.ops.pages import Lengths, in_slots
from tests.ops.step_family import Family
from torch_hybrid.layers.lightning_attention import alibi_slopes
from torch_hybrid.ops.ssd import lightning_step
from torch_hybrid.ops.ssd.op_step_lightning import IMPLEMENTATIONS, LightningStep
from torch_hybrid.ops.ssd.reference_step_lightning import lightning_step_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, 0 or 1 each, and the facts of one layer."""

    num_heads: int = 4
    dim: int = 16
    rotary_dim: int | None = 8  # None: there are no angles
    qk_norm: bool = True
    gated: bool = True
    norm_groups: int = 2
    activation: str = "none"
    wide: bool = False  # weights of norms in float32


@dataclass(slots=True, kw_only=True)
class Inputs(step_family.Inputs, LightningStep):
    """Arguments of a call."""

    norm_eps: float = 1e-5
    impl: str = ""

    @property
    def out_dtype(self) -> torch.dtype:
        """What is not gated is as exact as it was summed."""
        return torch.float32 if self.gate is None else self.qkv.dtype


CASES = {
    "one_token": Case(lengths=(1,), num_heads=1, norm_groups=1),
    "mixed": Case(lengths=(1, 0, 1, 1, 1, 0, 1), num_padding_tokens=3),
    "odd_dims": Case(
        lengths=(1, 1, 1), num_heads=3, dim=27, rotary_dim=6, norm_groups=1, activation="silu"
    ),
    "rotated_whole": Case(lengths=(1, 1), dim=20, rotary_dim=20, qk_norm=False),
    "nothing_rotated": Case(lengths=(1, 1), rotary_dim=0, wide=True),
    "ungated": Case(lengths=(1, 1), gated=False, num_padding_tokens=2),
    # A group of the norm is no whole number of heads.
    "minimax": Case(
        lengths=(1, 1),
        num_heads=6,
        dim=128,
        rotary_dim=None,
        qk_norm=False,
        norm_groups=4,
        activation="silu",
    ),
    "ring_2_5": Case(lengths=(1,) * 5, dim=128, rotary_dim=64, norm_groups=2),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs; per-token tensors are slices of one projection, as a model gives them.

    Slots that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=rng)
    width = case.num_heads * case.dim
    qkv, gate = randn(case.num_tokens, 4 * width).to(dtype).split([3 * width, width], 1)
    state = randn(case.num_slots, case.num_heads, case.dim, case.dim)
    slots = in_slots(case.lengths, rng, state)
    of_norms = torch.float32 if case.wide else dtype
    q_weight, k_weight = (1 + randn(2, case.dim) / 4).to(of_norms)
    cos = sin = None
    if case.rotary_dim is not None:
        angles = 6 * randn(case.num_tokens, case.rotary_dim // 2)
        cos, sin = angles.cos(), angles.sin()
    return Inputs(
        qkv=qkv,
        gate=gate if case.gated else None,
        q_norm_weight=q_weight.clone() if case.qk_norm else None,
        k_norm_weight=k_weight.clone() if case.qk_norm else None,
        cos=cos,
        sin=sin,
        slopes=alibi_slopes(case.num_heads),
        norm_weight=randn(width).to(of_norms) if case.gated else None,
        state=state,
        **slots,
        activation=case.activation,
        scale=case.dim**-0.5,
        norm_groups=case.norm_groups,
    )


FAMILY = Family(
    op=lightning_step,
    implementations=IMPLEMENTATIONS,
    reference=lightning_step_reference,
    cases=CASES,
    make_inputs=make_inputs,
)
