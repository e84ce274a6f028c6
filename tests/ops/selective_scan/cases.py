"""Inputs of the selective scan: shapes of real models and odd small ones.

Legend: T tokens, G groups of B and C, N states of a channel, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.declared import RecurrentInputs
from tests.ops.pages import Lengths, in_slots
from torch_hybrid.ops.selective_scan.op import SelectiveScan


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, and the shape of one layer."""

    channels: int = 48
    num_groups: int = 1
    state_dim: int = 16
    is_gated: bool = True
    bias: str = "none"  # of the steps: in the inputs' "own" dtype or in "float32"


@dataclass(slots=True, kw_only=True)
class Inputs(RecurrentInputs, SelectiveScan):
    """The arguments of one call."""

    impl: str = ""

    @property
    def q(self) -> Tensor:
        """What lies in rows apart, as the contract of recurrences calls it."""
        return self.x

    @property
    def v(self) -> Tensor:
        """What the outputs are like."""
        return self.x


CASES = {
    "one_token": Case(lengths=(1,), channels=16),
    "decode": Case(lengths=(1,) * 5, channels=80),
    "mixed": Case(lengths=(5, 0, 1, 70, 33, 2, 64), num_padding_tokens=3),
    "not_gated": Case(lengths=(3, 17), is_gated=False),
    "bias": Case(lengths=(3, 40), channels=38, bias="own"),
    "wide_bias": Case(lengths=(1, 33), bias="float32", num_padding_tokens=2),
    "groups": Case(lengths=(3, 37), channels=96, num_groups=3),
    "odd_sizes": Case(lengths=(3, 37, 16), channels=38, num_groups=2, state_dim=7),
    "many_states": Case(lengths=(1, 35), channels=20, state_dim=40),
    "mamba": Case(lengths=(40, 1), channels=1536),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs with decays of 1 to some 1000 tokens; some tokens forget all.

    x and z are slices of one tensor and so are B and C, as a model's projections give them. Slots
    that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    xz = torch.randn(case.num_tokens, 2 * case.channels, generator=rng).to(dtype)
    x, z = xz.split(case.channels, dim=1)
    BC = torch.randn(case.num_tokens, 2, case.num_groups, case.state_dim, generator=rng).to(dtype)
    dt = torch.linspace(-7.0, 2.0, case.channels).expand(case.num_tokens, -1)
    dt = dt + torch.randn(case.num_tokens, case.channels, generator=rng)
    dt[torch.rand(case.num_tokens, generator=rng) < 0.05] = 20.0
    state = torch.randn(case.num_slots, case.channels, case.state_dim, generator=rng)
    slots = in_slots(case.lengths, rng, state)
    A_log = torch.arange(1, case.state_dim + 1).log().expand(case.channels, -1)
    A_log = A_log + 0.3 * torch.randn(A_log.shape, generator=rng)
    biases = {"none": None, "own": dtype, "float32": torch.float32}
    bias_dtype = biases[case.bias]
    bias = None if bias_dtype is None else dt[0].to(bias_dtype)
    if bias is not None:
        dt = torch.randn(dt.shape, generator=rng)
    return Inputs(
        x=x,
        dt=dt.to(dtype),
        B=BC[:, 0],
        C=BC[:, 1],
        z=z if case.is_gated else None,
        A_log=A_log.to(dtype),
        D=torch.randn(case.channels, generator=rng).to(dtype),
        state=state,
        **slots,
        dt_bias=bias,
    )
