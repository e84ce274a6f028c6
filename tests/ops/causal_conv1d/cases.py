"""Inputs of the causal convolution: shapes of real models and odd small ones.

Legend: N sequences, T tokens, C channels, W width, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.declared import RecurrentInputs
from tests.ops.pages import Lengths, in_slots
from torch_hybrid.ops.causal_conv1d.op import CausalConv1d


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Lengths):
    """Lengths of the sequences, and the shape of one layer."""

    channels: int = 40
    width: int = 4
    has_bias: bool = False
    activation: str = "silu"
    has_gates: bool = False
    num_heads: int = 0  # of taps of each token


@dataclass(slots=True, kw_only=True)
class Inputs(RecurrentInputs, CausalConv1d):
    """The arguments of one call."""

    activation: str = "silu"
    impl: str = ""


CASES = {
    "one_token": Case(lengths=(1,), channels=16),
    "decode": Case(lengths=(1,) * 5, channels=48),
    "mixed": Case(lengths=(5, 0, 1, 70, 3, 2, 64), num_padding_tokens=3),
    "shorter_than_the_state": Case(lengths=(1, 2, 3, 4, 5, 6, 7), width=8, has_bias=True),
    "width_2": Case(lengths=(3, 1), channels=7, width=2, activation="none"),
    "width_3": Case(lengths=(3, 1), channels=1, width=3, has_bias=True, activation="none"),
    "width_5": Case(lengths=(9, 2), channels=33, width=5),
    "width_6": Case(lengths=(9, 2), channels=15, width=6, has_bias=True),
    "width_7": Case(lengths=(9, 2), channels=17, width=7),
    "width_10": Case(lengths=(40, 1, 3, 9), width=10),
    "width_16": Case(lengths=(1, 17, 2, 33), channels=40, width=16, activation="none"),
    "gates": Case(lengths=(5, 0, 1, 70, 3, 2, 64), has_gates=True, num_padding_tokens=3),
    "gates_of_one_token": Case(lengths=(1,) * 5, width=3, activation="none", has_gates=True),
    "token_taps": Case(
        lengths=(5, 0, 1, 70, 3, 2, 64), channels=60, num_heads=3, num_padding_tokens=3
    ),
    "token_taps_of_one_token": Case(lengths=(1,) * 5, width=3, activation="none", num_heads=5),
    "qwen3_next": Case(lengths=(1, 130, 16), channels=8192),
    "lfm2": Case(lengths=(1, 9), channels=1024, width=3, activation="none", has_gates=True),
    "lfm3": Case(
        lengths=(20, 1), channels=2048, width=7, has_bias=True, activation="none", has_gates=True
    ),
    "inkling2": Case(lengths=(20, 1), channels=2 * 8 * 128, activation="none", num_heads=16),
    "bamba": Case(lengths=(2, 70, 1), channels=128 * 64 + 2 * 128, has_bias=True),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs; x and its gates are slices of wider tensors, as a projection gives them.

    Slots that no sequence starts from hold NaN: those of new sequences, and the null slot.
    """
    rng = torch.Generator().manual_seed(seed)
    past = case.width - 1
    projected = torch.randn(case.num_tokens, case.channels + 24, generator=rng).to(dtype)
    conv_state = torch.randn(case.num_slots, past, case.channels, generator=rng).to(dtype)
    slots = in_slots(case.lengths, rng, conv_state)
    bias = torch.randn(case.channels, generator=rng).to(dtype)
    weight = torch.randn(case.channels, case.width, generator=rng).to(dtype)
    gates = {}
    if case.has_gates:
        wide = torch.randn(2, case.num_tokens, case.channels + 8, generator=rng).to(dtype)
        gates = {
            "input_gate": wide[0, :, 8:],
            "output_gate": wide[1].repeat(1, 2)[:, : case.channels],
        }
    if case.num_heads:
        shape = (case.num_tokens, case.num_heads, case.width)
        gates = {"token_taps": torch.randn(shape, generator=rng).to(dtype)}
    return Inputs(
        x=projected[:, : case.channels],
        weight=weight,
        bias=bias if case.has_bias else None,
        conv_state=conv_state,
        **slots,
        activation=case.activation,
        **gates,
    )
