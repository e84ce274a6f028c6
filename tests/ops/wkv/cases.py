"""Inputs of RWKV's weighted average: shapes of real models and odd small ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.declared import RecurrentInputs
from tests.ops.pages import Lengths, in_slots
from torch_hybrid.ops.wkv.op import Wkv


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, and the width of one layer."""

    num_channels: int = 48


@dataclass(slots=True, kw_only=True)
class Inputs(RecurrentInputs, Wkv):
    """The arguments of one call."""

    impl: str = ""


CASES = {
    "one_token": Case(lengths=(1,), num_channels=16),
    "decode": Case(lengths=(1,) * 5, num_channels=210),
    "mixed": Case(lengths=(5, 0, 1, 70, 3, 2, 64), num_padding_tokens=3),
    "one_channel": Case(lengths=(3, 9), num_channels=1),
    "odd": Case(lengths=(33, 2, 17), num_channels=95),
    "rwkv_4_1b5": Case(lengths=(1, 130, 16), num_channels=2048),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs that are forgotten over 1 to 1000 tokens; k and v are slices of a projection.

    Slots that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    channels = case.num_channels
    projected = (2 * torch.randn(case.num_tokens, 2 * channels + 24, generator=rng)).to(dtype)
    state = torch.randn(case.num_slots, 3, channels, generator=rng)
    state[:, 1] = state[:, 1].abs() + 0.5
    slots = in_slots(case.lengths, rng, state)
    return Inputs(
        k=projected[:, :channels],
        v=projected[:, channels : 2 * channels],
        log_decay=-(1000 ** -torch.rand(channels, generator=rng)),
        bonus=torch.randn(channels, generator=rng),
        state=state,
        **slots,
    )
