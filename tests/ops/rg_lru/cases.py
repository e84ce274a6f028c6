"""Inputs of the real-gated linear recurrent unit: shapes of real models and odd small ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.declared import RecurrentInputs
from tests.ops.pages import Lengths, in_slots
from torch_hybrid.ops.rg_lru.op import RgLru


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, and the shape of one layer."""

    num_heads: int = 2
    head_dim: int = 24

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(slots=True, kw_only=True)
class Inputs(RecurrentInputs, RgLru):
    """The arguments of one call."""

    impl: str = ""


CASES = {
    "one_token": Case(lengths=(1,), num_heads=1, head_dim=16),
    "decode": Case(lengths=(1,) * 5, num_heads=3, head_dim=70),
    "mixed": Case(lengths=(5, 0, 1, 70, 3, 2, 64), num_padding_tokens=3),
    "one_channel": Case(lengths=(3, 9), num_heads=1, head_dim=1),
    "odd": Case(lengths=(33, 2, 17), num_heads=5, head_dim=19),
    "recurrentgemma_2b": Case(lengths=(1, 130, 16), num_heads=10, head_dim=256),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs that are forgotten over 1 to 1000 tokens; x is a slice of a projection, and
    gates are as a product for each head gives them.

    Slots that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    projected = torch.randn(case.num_tokens, case.channels + 24, generator=rng).to(dtype)
    gates = torch.randn(case.num_heads, case.num_tokens, 2 * case.head_dim, generator=rng).to(dtype)
    state = torch.randn(case.num_slots, case.channels, generator=rng)
    slots = in_slots(case.lengths, rng, state)
    return Inputs(
        x=projected[:, : case.channels],
        gates=gates.transpose(0, 1),
        log_a=-(1000 ** -torch.rand(case.channels, generator=rng)),
        state=state,
        **slots,
    )
